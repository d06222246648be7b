"""One node's part in a round, without any network:
the same code behind the broker and in simulation.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from broker_config.protocol.errors import EdgeNodeError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import is_statistics_round
from edge.bundle.comparison import CandidateName
from edge.inference import native_memory
from edge.uncertainty.performance import wilson_interval
from trainer.data.class_folders import Images, LabelledImages, split_folds
from trainer.methods import PRIVATE_CLASSIFIERS, complete_options, make
from trainer.methods.base import EPSILON, Metrics, Phase
from trainer.models.fusion import LENGTH, infer_fusion, mix, mix_logits, spread_ratio
from trainer.models.named_tensors import Arrays, add_prefix, select, strip_prefix
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.privacy.account import Account
from trainer.privacy.noise import derive_key, draw_normal
from trainer.privacy.plan import squared_distance
from trainer.statistics.lda_head import fit_scale
from trainer.statistics.sums import PREFIX, choose_images
from trainer.training.alone import TrainedAlone, alone_spec
from trainer.training.engine import encode_all, predict, run_phase
from trainer.training.evaluation import accuracy, compare, macro_f1, predict_among
from trainer.training.personal_model import (
    HeldOutPrediction,
    ModelMetadata,
    PersonalModel,
    TrainingImage,
)
from trainer.training.private_gradients import PrivateGradients
from trainer.training.seeding import generator, key_to_seed
from trainer.training.training_set import TrainingSet

EVALUATE_EVERY = 5  # rounds between two looks at held-out images
_EXACT = "exact"  # prefix of a node's sums where others leave it
# of cross-validation
_FOLDS = 5
_FOLD_ROUNDS = 10
_NEVER = 10.0  # how far the logit of a class that is not to be named lies below all others


class State(NamedTuple):
    """All that a node carries from one round to the next."""

    tensors: Tensors
    moments: Tensors  # Adam's

    def save(self, path: Path) -> None:
        """Write both to a safetensors file."""
        save_file({**add_prefix("tree", self.tensors), **add_prefix("moments", self.moments)}, path)

    @staticmethod
    def load(path: Path) -> "State":
        """Read what `save` wrote."""
        tensors = {name: value.clone() for name, value in load_file(path).items()}
        return State(strip_prefix("tree", tensors), strip_prefix("moments", tensors))


class Contributed(NamedTuple):
    """The contribution that leaves the node after stage 1."""

    tensors: Arrays
    weight: float


def never_stop() -> bool:
    """The stop condition of training that is never interrupted."""
    return False


class Participant:
    """One node of a federation: its method, its images, its share of the seed.

    Holds no training state itself.

    Where random numbers protect what the node sends, they are drawn from the seed and the node's
    own `secret`; what a private federation's rounds spend is put on the `account`. A head of
    statistics never names the labels `without`.
    """

    def __init__(
        self,
        spec: Spec,
        node: str,
        images: Images,
        device: str = "cpu",
        secret: str = "",
        without: Collection[int] = (),
        account: Account | None = None,
        evaluate_every: int = EVALUATE_EVERY,
    ):
        self._evaluate_every = evaluate_every
        self._without = sorted(without)
        self._account = account or Account()
        self.spec = spec
        self.node = node
        self._images = images
        self._device = device
        self._secret = secret
        self.method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
        self.network = Network(spec.model, len(spec.classes))
        self.data = TrainingSet.of(images.train, spec.preprocessing, device)
        self.own = sorted(set(images.train.labels.tolist()))  # labels of the node's classes
        self._held_out: TrainingSet | None = None  # loaded at the first evaluation
        # positions of the images that statistics are of
        self._counted = choose_images(images.train.labels)
        self._features: Arrays | None = None  # of these, for cross-validation
        # Whether `deploy` takes the result of the run, and whether `conclude` needs it, or only the
        # broadcast of the last round: the totals of statistics are in the result alone.
        self.deploys_final = self.method.deploys_final or bool(spec.statistics)
        self.needs_final = self.deploys_final or images.test is None

    @classmethod
    def alone(cls, spec: Spec, node: str, images: Images, device: str = "cpu") -> "Participant":
        """The same node as it trains without the federation `spec`;
        its broadcasts are the encoder to begin with.
        """
        return cls(alone_spec(spec), node, Images(images.train, None), device)

    def start(self, broadcast: Arrays) -> State:
        """The state before the first round.

        Raises UsageError if the broadcast does not fit the model.
        """
        received = self.received(broadcast)
        self.network.check(received, "the coordinator's broadcast")
        own = self.method.init_node(
            broadcast, self.network.shape, generator(self.spec.seed, self.node, "init")
        )
        return State({**received, **self.tensors(own)}, {})

    def received(self, broadcast: Arrays) -> Tensors:
        """The part of a broadcast that is meant for this node, on its device."""
        return self.tensors(self.method.admit(broadcast, self.node))

    def tensors(self, arrays: Arrays) -> Tensors:
        """The arrays as tensors on the node's device."""
        return to_tensors(arrays, self._device)

    def contribute(
        self, state: State, broadcast: Arrays, round_: int, stop: Callable[[], bool] = never_stop
    ) -> tuple[State, Contributed, Metrics]:
        """Stage 1: receive, train, and make the contribution; in a round for statistics,
        compute these alone.
        """
        received = self.received(broadcast)
        if is_statistics_round(self.spec, round_):
            state = self._with_statistics(state, received)
            basis = self._spend(round_, *state, received)
            state = self._with_released(state, received, basis)
            return state, Contributed(self._statistics(state), 1.0), self._spent()
        state = self.receive(state, received)
        basis = self._spend(round_, *state, received)
        state, metrics = self._run(self.method.train, state, received, round_, stop, basis)
        state = self.adapt(state, received)
        return state, self.send(state, received, metrics, round_), metrics | self._spent()

    def with_statistics(self, state: State, broadcast: Arrays) -> State:
        """The state with the node's sums, of which nothing leaves it."""
        return self._with_statistics(state, self.received(broadcast))

    def _spend(self, round_: int, *begins: Tensors) -> str:
        """Put a round on the account, before anything is made;
        returns the digest of what it begins with.
        """
        if self.spec.privacy is None:
            return ""
        train = self._images.train
        digest = hashlib.blake2b(
            msgspec.json.encode([self.spec.run, round_, train.digests, train.labels.tolist()])
        )
        for part in begins:
            for name, value in sorted(part.items()):
                digest.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
        basis = digest.hexdigest()
        self._account.spend(
            self.spec.run, round_, basis, squared_distance(self.spec, self.method, round_)
        )
        return basis

    def _spent(self) -> Metrics:
        return {EPSILON.key: self._account.epsilon} if self.spec.privacy else {}

    def _with_released(self, state: State, received: Tensors, basis: str) -> State:
        """The state with what leaves of the node's sums, where that is not the sums themselves."""
        assert self.method.statistics is not None
        release = self.method.statistics.release
        if release is None:
            return state
        exact = self._exact_statistics(state)
        parts = (exact[name].tobytes() for name in sorted(exact))
        key = derive_key(self._secret.encode(), b"sums", basis.encode(), *parts)

        def normal(name: str, count: int) -> np.ndarray:
            return np.asarray(draw_normal([derive_key(key, name.encode())], count)[0])

        released = release(self.network, received, self.training_set(received), exact, normal)
        return State({**state.tensors, **self.tensors(released)}, state.moments)

    def receive(self, state: State, received: Tensors) -> State:
        """The state that stage 1 starts from."""
        torch.set_num_threads(self.spec.threads)
        moments = state.moments if self.spec.training.moments == "keep" else {}
        return State(self.method.receive(state.tensors, received), moments)

    def adapt(self, state: State, received: Tensors) -> State:
        """The state with what the method makes of the training images' features, if it does."""
        return State(self._adapt(state.tensors, received), state.moments)

    def _adapt(self, tensors: Tensors, received: Tensors) -> Tensors:
        if self.method.adapt is None:
            return tensors
        torch.set_num_threads(self.spec.threads)
        data = self.training_set(received)
        return self.method.adapt(
            tensors, received, encode_all(self.network, tensors, data), data.labels.cpu().numpy()
        )

    def send(self, state: State, received: Tensors, metrics: Metrics, round_: int) -> Contributed:
        """The contribution after stage 1, which ended with `state` and `metrics`."""
        weight = self.method.measure(metrics, len(self.data.labels))
        sent = to_arrays(select(self.method.contribute(state.tensors, received), self.spec.sends))
        if (relay := self.method.relay) is not None:
            secret = (self._secret,) if relay.protection else ()
            random = generator(self.spec.seed, self.node, round_, "relay", *secret)
            sent |= relay.make(self.network, received, self.training_set(received), random)
        return Contributed(sent, weight)

    def _with_statistics(self, state: State, received: Tensors) -> State:
        """The state with the node's statistics, computed anew."""
        features = self._compute_features(received)
        if self._images.test is None:
            self._features = features
        sums = self._sum(features)
        exact = add_prefix(_EXACT, sums) if self._is_private else sums
        return State(
            {**state.tensors, **exact},
            state.moments,
        )

    @property
    def _is_private(self) -> bool:
        """Whether what leaves of the node's sums is not the sums themselves."""
        return bool(self.method.statistics and self.method.statistics.release)

    def _compute_features(self, received: Tensors) -> Arrays:
        assert self.method.statistics is not None
        torch.set_num_threads(self.spec.threads)
        data = self.training_set(received)
        counted = data._replace(
            images=data.images[self._counted], labels=data.labels[self._counted], stem_output=None
        )
        return self.method.statistics.features(self.network, received, counted)

    def _sum(self, features: Arrays, held_out: Sequence[int] | np.ndarray = ()) -> Tensors:
        """The statistics of the node's images, without those at the positions `held_out`."""
        assert self.method.statistics is not None
        kept = ~np.isin(self._counted, held_out)
        rows = {name: each[kept] for name, each in features.items()}
        labels = self._images.train.labels[self._counted]
        return self.tensors(self.method.statistics.make(rows, labels[kept], len(self.spec.classes)))

    def _statistics(self, state: State) -> Arrays:
        """The node's statistics in its state, as they have left it."""
        return to_arrays({name: state.tensors[name] for name in self.spec.statistics})

    def _exact_statistics(self, state: State) -> Arrays:
        """The same as the node's images make them."""
        return (
            to_arrays(strip_prefix(_EXACT, state.tensors))
            if self._is_private
            else self._statistics(state)
        )

    def refine(
        self, state: State, broadcast: Arrays, round_: int, stop: Callable[[], bool] = never_stop
    ) -> tuple[State, Metrics]:
        """Stage 2: training that goes on while the contribution is under way;
        nothing in a round for statistics.
        """
        if is_statistics_round(self.spec, round_):
            return state, {}
        received = self.received(broadcast)
        state, metrics = self._run(self.method.refine, state, received, round_, stop)
        return state, metrics | self.evaluate_round(state, received, round_)

    def evaluate_round(self, state: State, received: Tensors, round_: int) -> Metrics:
        """Metrics after stage 2: the method's own, and every few rounds the accuracy on held-out
        images.

        `accuracy` is among the node's own classes, `accuracy_all` among all of the federation.
        """
        metrics = self.method.inspect(state.tensors)
        test = self._images.test
        if test is not None and (round_ % self._evaluate_every == 0 or round_ == self.spec.rounds):
            logits = self._predict_held_out(self._deploy(state.tensors, received), test)
            own = np.isin(test.labels, self.own)
            metrics["accuracy"] = accuracy(predict_among(logits[own], self.own), test.labels[own])
            metrics["accuracy_all"] = accuracy(logits.argmax(1), test.labels)
        return metrics

    def conclude(
        self,
        state: State,
        round_: int,
        broadcast: Arrays,
        final: Arrays,
        history: tuple[Metrics, ...],
        alone: TrainedAlone | None,
        everyone: LabelledImages | None = None,
        *,
        counted: bool = True,
    ) -> PersonalModel:
        """The personal model after the last round: the best of what was trained alone,
        together, and both mixed.

        Its `accuracy` with 95 % interval (`accuracy_low`, `accuracy_high`) and macro `f1` are those
        among the node's own classes, on its held-out `images` of them; without any, by
        cross-validation over the training images (`cross_validated` = 1): each fold is evaluated by
        heads trained anew, from the last average, on the other folds. Every image has influenced
        that average a little, so the figure is slightly optimistic. A shared classifier, or what
        `adapt` shares, has learnt more from it: where there is such, the folds use the method that
        trains private classifiers on the averaged encoder. `accuracy_all`: all of the federation's
        classes being candidates. `accuracy_others`: likewise, on the images of `everyone` that are
        of classes that the node has none of.

        With statistics the folds take their own images' sums instead of the node's: nothing is
        trained anew, and an image influences its own evaluation only through the encoder, if that
        was trained. How certain the head is follows from the same images. A node without images has
        nothing to judge by: there are no metrics then.

        Args:
            state: after the last round.
            round_: its number.
            broadcast: that it started from.
            final: the average made after it; the same as `broadcast` will do unless `needs_final`.
            history: metrics of each round.
            alone: what the node has trained without others, if the method is not that itself.
            everyone: held-out images of all nodes, if they are at hand; `accuracy_all` is then
                theirs.
            counted: whether the totals in `final` hold the node's statistics, if there are any.

        Raises:
            EdgeNodeError: no nodes can have such totals.
        """
        if self.spec.statistics:
            others = self.without_own(state, final, counted=counted)
            if not counted:
                state = self._with_statistics(state, self.received(final))
            final = others
        together = self._deploy_last(state, broadcast, final)
        native_memory.trim_heap()  # what a head's matrices took, before images are judged
        if not len(self._images.train.labels):
            metadata = ModelMetadata.from_spec(
                self.spec, self.node, round_, {}, {}, history, epsilon=self._account.epsilon
            )
            return PersonalModel(metadata, together, shared=self._shared(final))
        judged, logits, known = self._predict_candidates(together, final, alone)
        if self.spec.statistics:
            certainty = fit_scale(logits["together"][known], judged.labels[known], 1)
            logits["together"] *= certainty
            together |= {
                name: value * certainty for name, value in select(together, ("classifier",)).items()
            }
            together = self._lengthen(together)
        own = np.isin(judged.labels, self.own)
        labels = judged.labels[own]
        deployed = together
        comparison = None
        if alone is not None:
            scale = spread_ratio(logits["together"], logits["alone"], self.own)
            logits["mixed"] = mix_logits(logits["together"], logits["alone"], self.own, scale)
            accuracies = [metrics["accuracy"] for metrics in history if "accuracy" in metrics]
            comparison = compare(
                {name: each[own] for name, each in logits.items()},
                labels,
                self.own,
                accuracies,
                cross_validated=self._images.test is None,
            )
            candidates = {"alone": alone.tensors, "together": together}
            deployed = candidates.get(comparison.deployed) or mix(
                together, alone.tensors, self.own, scale
            )
        chosen_deployed = comparison.deployed if comparison else "together"
        chosen = logits[chosen_deployed]
        predicted = predict_among(chosen[own], self.own)
        low, high = wilson_interval(int((predicted == labels).sum()), len(labels))
        metrics = {
            "accuracy": accuracy(predicted, labels),
            "accuracy_low": low,
            "accuracy_high": high,
            "f1": macro_f1(predicted, labels),
            "images": float(len(labels)),
            "accuracy_all": accuracy(chosen.argmax(1), judged.labels),
            "cross_validated": float(self._images.test is None),
        }
        if everyone is not None:
            metrics |= self._judge_on_all(deployed, everyone)
        training = _training_images(self._images.train, self.spec.classes)
        trained = Counter(image.label for image in training)
        metadata = ModelMetadata.from_spec(
            self.spec,
            self.node,
            round_,
            dict(sorted(trained.items())),
            metrics,
            history,
            comparison,
            self._account.epsilon,
        )
        predictions = _predictions(judged, chosen, self.spec.classes)
        return PersonalModel(metadata, deployed, predictions, training, self._shared(final))

    def without_own(self, state: State, final: Arrays, *, counted: bool) -> Arrays:
        """The result of a run with the other nodes' totals of statistics.

        Args:
            state: with this node's statistics, if the totals hold them.
            final: the result.
            counted: whether they do.

        Raises:
            EdgeNodeError: no nodes can have such totals.
        """
        assert self.method.statistics is not None
        others = add_statistics(final, self._statistics(state), -1) if counted else final
        try:
            self.method.statistics.check_totals(others, self.spec.nodes)
        except ValueError as error:
            raise EdgeNodeError(
                "the coordinator's totals cannot be sums over the plants, this one among them",
                "nothing was made of them: have whoever runs the coordinator look at its "
                "machine, then start a new run",
            ) from error
        return others

    def _shared(self, final: Arrays) -> Tensors:
        """What a head of statistics can be made of anew, with other images of this node,
        of the others' totals.
        """
        return to_tensors(select(final, ("encoder", PREFIX))) if self.spec.statistics else {}

    def _predict_candidates(
        self, together: Tensors, final: Arrays, alone: TrainedAlone | None
    ) -> tuple[LabelledImages, dict[CandidateName, np.ndarray], np.ndarray]:
        """The images by which models are compared, each model's logits [n,
        classes] for them, and `_knows` [n].
        """
        test = self._images.test
        logits: dict[CandidateName, np.ndarray]
        if test is not None:
            logits = {"together": self._predict_held_out(together, test)}
            if alone is not None:
                logits["alone"] = self._predict_held_out(alone.tensors, test)
            return test, logits, _knows(together, test.labels)
        spec = self.spec
        start = final
        if not spec.statistics and ("classifier.weight" in final or self.method.adapt is not None):
            options = complete_options(PRIVATE_CLASSIFIERS, {})
            spec = msgspec.structs.replace(spec, method=PRIVATE_CLASSIFIERS, options=options)
            average = (
                to_arrays(together) if self.deploys_final else final
            )  # with private layers, it is whole only as deployed
            start = select(average, ("encoder",))
        together_logits, known = self._cross_validate(spec, start)
        logits = {"together": together_logits}
        if alone is not None:
            logits["alone"], _ = self._cross_validate(alone_spec(self.spec), alone.initial)
        return self._images.train, logits, known

    def _cross_validate(self, spec: Spec, start: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Logits [n, classes] for the training images, and `_knows` [n],
        each by a model that has not seen it.
        """
        images = self._images.train
        logits = np.empty((len(images.labels), len(self.spec.classes)), np.float32)
        known = np.empty(len(images.labels), bool)
        features = (
            (self._features or self._compute_features(self.received(start)))
            if spec.statistics
            else None
        )
        for held_out in split_folds(images, min(_FOLDS, len(images.labels)), spec.seed):
            if features is None:
                others = np.setdiff1d(np.arange(len(images.labels)), held_out)
                personal = self._train_fold(spec, start, images.take(others))
            else:
                personal = self._deploy_statistics(
                    self._sum(features, held_out), start, served=False
                )
            data = TrainingSet.of(images.take(held_out), self.spec.preprocessing, self._device)
            logits[held_out] = self._predict(personal, data)
            known[held_out] = _knows(personal, images.labels[held_out])
        return logits, known

    def _train_fold(self, spec: Spec, start: Arrays, images: LabelledImages) -> Tensors:
        """The personal model that training on these images from `start` gives."""
        fold = Participant(spec, self.node, Images(images, None), self._device, self._secret)
        state = fold.start(start)
        for round_ in range(min(_FOLD_ROUNDS, spec.rounds)):
            state, _, _ = fold.contribute(state, start, round_)
            state, _ = fold.refine(state, start, round_)
        return fold._deploy_last(state, start, start)

    def _judge_on_all(self, deployed: Tensors, everyone: LabelledImages) -> Metrics:
        """Accuracy on all nodes' held-out images, and on those of them whose classes this node
        has none of.
        """
        data = TrainingSet.of(everyone, self.spec.preprocessing, self._device)
        right = self._predict(deployed, data).argmax(1) == everyone.labels
        others = ~np.isin(everyone.labels, self.own)
        metrics = {"accuracy_all": float(right.mean())}
        others_accuracy = {"accuracy_others": float(right[others].mean())} if others.any() else {}
        return metrics | others_accuracy

    def _deploy(self, own: Tensors, received: Tensors) -> Tensors:
        """The personal model as training has made it."""
        if self.method.adapt is not None:
            own = self._adapt({**own, **received}, received)
        personal = self.method.deploy(own, received)
        assert infer_fusion(personal) == self.method.fusion, (
            f"{self.spec.method} deploys another fusion than it declares"
        )
        return personal

    def _deploy_last(self, state: State, broadcast: Arrays, final: Arrays) -> Tensors:
        """The personal model after the last round, which started from `broadcast` and led to
        `final`.

        Totals of statistics in `final` are those of the other nodes.
        """
        if self.spec.statistics:
            return self._deploy_statistics(
                self.tensors(self._exact_statistics(state)), final, served=True
            )
        received = final if self.deploys_final else broadcast
        return self._deploy(state.tensors, self.tensors(received))

    def _deploy_statistics(self, own: Tensors, others: Arrays, *, served: bool) -> Tensors:
        """The personal model of these sums of the node and of totals of the other nodes."""
        assert self.method.statistics is not None
        made = self.method.statistics.deploy(self.network, own, self.tensors(others), served)
        return _without(made, self._without)

    def _lengthen(self, personal: Tensors) -> Tensors:
        """The same model of normalised features, brought to the mean length that the node's
        images have without that.

        Its logits stay. Mixed with a model whose features are as they come, neither drowns the
        other in a distance.
        """
        if LENGTH not in personal or not len(self.data.labels):
            return personal
        torch.set_num_threads(self.spec.threads)
        length = float(np.linalg.norm(encode_all(self.network, personal, self.data), axis=1).mean())
        return (
            personal
            if length == 0
            else personal
            | {
                LENGTH: personal[LENGTH] * length,
                "classifier.weight": personal["classifier.weight"] / length,
            }
        )

    def _predict_held_out(self, personal: Tensors, test: LabelledImages) -> np.ndarray:
        if self._held_out is None:
            torch.set_num_threads(self.spec.threads)
            data = TrainingSet.of(test, self.spec.preprocessing, self._device)
            self._held_out = data.with_stem_output(self.network, personal)
        return self._predict(personal, self._held_out)

    def _predict(self, personal: Tensors, data: TrainingSet) -> np.ndarray:
        torch.set_num_threads(self.spec.threads)
        return predict(self.network, personal, data)

    def _run(
        self,
        phases: tuple[Phase, ...],
        state: State,
        received: Tensors,
        round_: int,
        stop: Callable[[], bool],
        basis: str = "",
    ) -> tuple[State, Metrics]:
        # OpenMP keeps the thread count per calling thread, and sums depend on it.
        torch.set_num_threads(self.spec.threads)
        metrics: Metrics = {}
        for phase in phases:
            state, measured = self.train(phase, state, received, round_, stop, basis)
            metrics |= measured
        return state, metrics

    def train(
        self,
        phase: Phase,
        state: State,
        received: Tensors,
        round_: int,
        stop: Callable[[], bool] = never_stop,
        basis: str = "",
    ) -> tuple[State, Metrics]:
        """One phase of a stage; in a private federation, of a round that started from `basis`."""
        data = self.training_set(received)
        privacy = self.spec.privacy
        private = PrivateGradients(privacy, self._secret, basis, phase.name) if privacy else None
        tensors, moments, metrics = run_phase(
            self.network,
            phase,
            *state,
            received,
            data,
            self.spec.training,
            self.seed(round_, phase),
            stop,
            private,
        )
        return State(tensors, moments), metrics

    def training_set(self, received: Tensors) -> TrainingSet:
        """The training images; a frozen stem's output for them is cached,
        unless they are augmented.
        """
        if self.data.stem_output is None and not self.spec.training.augment:
            self.data = self.data.with_stem_output(self.network, received)
        return self.data

    def seed(self, round_: int, phase: Phase) -> int:
        """The seed of a phase's random numbers.

        In a private federation it is a secret. Which view of an image is drawn depends on its place
        among the others: if views were known, an image that is replaced would change what is known
        of all.
        """
        secret = (self._secret,) if self.spec.privacy else ()
        return key_to_seed(self.spec.seed, self.node, round_, phase.name, *secret)


def add_statistics(broadcast: Arrays, sums: Arrays, sign: int = 1) -> Arrays:
    """The result of a run with a node's statistics added to the totals, or taken out of them."""
    return {**broadcast, **{name: broadcast[name] + sign * values for name, values in sums.items()}}


def _without(personal: Tensors, labels: Sequence[int]) -> Tensors:
    """A model of normalised features that never names these classes:
    their logits are below all others' least ones.
    """
    if not labels:
        return personal
    weight = personal["classifier.weight"].clone()
    bias = personal["classifier.bias"].clone()
    lowest = (bias - personal[LENGTH] * weight.norm(dim=1)).min()
    weight[labels] = 0
    bias[labels] = lowest - _NEVER
    return {**personal, "classifier.weight": weight, "classifier.bias": bias}


def _knows(personal: Tensors, labels: np.ndarray) -> np.ndarray:
    """Whether a model knows anything of each of these classes, [n]:
    without images of a class, its weight is zero.
    """
    return np.asarray(personal["classifier.weight"][torch.from_numpy(labels)].any(1).cpu())


def _predictions(
    images: LabelledImages, logits: np.ndarray, classes: Sequence[str]
) -> tuple[HeldOutPrediction, ...]:
    """The prediction for each image, from logits [n, classes]."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    confidences = (exponentials / exponentials.sum(1, keepdims=True)).max(1)
    return tuple(
        HeldOutPrediction(
            path=str(path.resolve()),
            digest=digest,
            label=classes[label],
            verdict=classes[predicted],
            confidence=float(confidence),
        )
        for path, digest, label, predicted, confidence in zip(
            images.paths, images.digests, images.labels, logits.argmax(1), confidences, strict=True
        )
    )


def _training_images(images: LabelledImages, classes: Sequence[str]) -> tuple[TrainingImage, ...]:
    return tuple(
        TrainingImage(path=str(path.resolve()), digest=digest, label=classes[label])
        for path, digest, label in zip(images.paths, images.digests, images.labels, strict=True)
    )
