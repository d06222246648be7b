"""One node's part in a round, without any network.

The same code runs behind the broker and in simulation. `node_statistics` knows the node's sums,
`conclusion` judges what the last round has led to.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import is_statistics_round
from broker_config.security.one_time import bind, digest_spec
from trainer.data.class_folders import Images, LabelledImages
from trainer.data.training_set import TrainingSet, encode_all
from trainer.methods import make
from trainer.methods.base import EPSILON, Metrics, Phase
from trainer.models.fusion import infer_fusion
from trainer.models.named_tensors import Arrays, add_prefix, select, strip_prefix
from trainer.models.network import Network, Tensors, to_arrays, to_tensors
from trainer.privacy.spent_account import Account
from trainer.seeding import generator, key_to_seed
from trainer.training.alone import alone_spec
from trainer.training.engine import predict, run_phase
from trainer.training.evaluation import accuracy, predict_among
from trainer.training.node_statistics import NodeStatistics
from trainer.training.privacy_plan import squared_distance
from trainer.training.private_gradients import PrivateGradients

EVALUATE_EVERY = 5  # rounds between two looks at held-out images


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
        self._account = account or Account()
        self._basis = ""  # of the newest release
        self.spec = spec
        self.node = node
        self.images = images
        self.device = device
        self._secret = secret
        self.method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
        self.network = Network(spec.model, len(spec.classes))
        self.data = TrainingSet.of(images.train, spec.preprocessing, device)
        self.own = sorted(set(images.train.labels.tolist()))  # labels of the node's classes
        self._held_out: TrainingSet | None = None  # loaded at the first evaluation
        self.statistics = (
            NodeStatistics(spec, self.method, self.network, images.train, device, secret, without)
            if self.method.statistics
            else None
        )
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
        return to_tensors(arrays, self.device)

    def contribute(
        self, state: State, broadcast: Arrays, round_: int, stop: Callable[[], bool] = never_stop
    ) -> tuple[State, Contributed, Metrics]:
        """Stage 1: receive, train, and make the contribution; in a round for statistics,
        compute these alone.
        """
        received = self.received(broadcast)
        if is_statistics_round(self.spec, round_):
            return self._contribute_statistics(state, received, round_)
        state = self.receive(state, received)
        basis = self._spend(round_, *state, received)
        state, metrics = self._run(self.method.train, state, received, round_, stop, basis)
        state = self.adapt(state, received)
        return state, self.send(state, received, metrics, round_), metrics | self._spent()

    def _contribute_statistics(
        self, state: State, received: Tensors, round_: int
    ) -> tuple[State, Contributed, Metrics]:
        assert self.statistics is not None
        data = self.training_set(received)
        tensors = self.statistics.keep(state.tensors, self.statistics.features(received, data))
        basis = self._spend(round_, tensors, state.moments, received)
        tensors = self.statistics.release(tensors, received, data, basis)
        sent = Contributed(self.statistics.sent(tensors), 1.0)
        return State(tensors, state.moments), sent, self._spent()

    def with_statistics(self, state: State, broadcast: Arrays) -> State:
        """Return the state with the node's sums, of which nothing leaves it."""
        assert self.statistics is not None
        received = self.received(broadcast)
        features = self.statistics.features(received, self.training_set(received))
        return State(self.statistics.keep(state.tensors, features), state.moments)

    def _spend(self, round_: int, *begins: Tensors) -> str:
        """Put a round on the account, before anything is made;
        returns the digest of what it begins with.
        """
        if self.spec.privacy is None:
            return ""
        self._basis = basis = self._bind("release", round_, *begins)
        self._account.spend(
            self.spec.run, round_, basis, squared_distance(self.spec, self.method, round_)
        )
        return basis

    def _bind(self, what: str, round_: int, *begins: Tensors) -> str:
        """Return the digest of all that determines what leaves the node in a round."""
        train = self.images.train
        taught = msgspec.json.encode([train.digests, train.labels.tolist()])
        parts: list[str | bytes] = [what, digest_spec(self.spec), str(round_), taught]
        for part in begins:
            for name, value in sorted(part.items()):
                parts += [name, value.detach().cpu().contiguous().numpy().tobytes()]
        return bind(*parts)

    def confirm(self, round_: int, digest: str) -> None:
        """Record the digest of the bytes that leave in a round, made just now.

        EdgeNodeError if others have left of the same.
        """
        if self.spec.privacy is not None:
            self._account.confirm(self.spec.run, round_, self._basis, digest)

    def _spent(self) -> Metrics:
        return {EPSILON.key: self._account.epsilon} if self.spec.privacy else {}

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
            secret: tuple[str, ...] = ()
            if relay.protection:
                secret = (self._secret, self._bind("relay", round_, received))
            random = generator(self.spec.seed, self.node, round_, "relay", *secret)
            sent |= relay.make(self.network, received, self.training_set(received), random)
        return Contributed(sent, weight)

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
        test = self.images.test
        if test is not None and (round_ % self._evaluate_every == 0 or round_ == self.spec.rounds):
            logits = self.predict_held_out(self._deploy(state.tensors, received), test)
            own = np.isin(test.labels, self.own)
            metrics["accuracy"] = accuracy(predict_among(logits[own], self.own), test.labels[own])
            metrics["accuracy_all"] = accuracy(logits.argmax(1), test.labels)
        return metrics

    def may_hold_own(self, state: State, totals: Arrays) -> bool:
        """Return whether totals of statistics can hold this node's, which `state` has."""
        assert self.statistics is not None
        return self.statistics.may_hold(totals, state.tensors)

    def without_own(self, state: State, final: Arrays, *, counted: bool) -> Arrays:
        """Return the result of a run with the other nodes' totals of statistics.

        `counted` says whether the totals hold this node's, which `state` has then.

        Raises:
            EdgeNodeError: no nodes can have such totals.
        """
        assert self.statistics is not None
        return self.statistics.without_own(state.tensors, final, counted=counted)

    def fold(self, spec: Spec, images: Images, account: Account | None = None) -> "Participant":
        """Return the same node with other images, in another federation.

        It spends nothing of the node's own account, unless that is given.
        """
        return Participant(spec, self.node, images, self.device, self._secret, account=account)

    @property
    def account(self) -> Account:
        """The account of what has left the node of its images."""
        return self._account

    @property
    def is_frozen(self) -> bool:
        """Whether the encoder is nobody's work: heads are then judged by all of the images."""
        return bool(self.spec.statistics) and not self.method.train

    @property
    def epsilon(self) -> float:
        """What the node's rounds have spent of its images' privacy."""
        return self._account.epsilon

    def _deploy(self, own: Tensors, received: Tensors) -> Tensors:
        """The personal model as training has made it."""
        if self.method.adapt is not None:
            own = self._adapt({**own, **received}, received)
        personal = self.method.deploy(own, received)
        assert infer_fusion(personal) == self.method.fusion, (
            f"{self.spec.method} deploys another fusion than it declares"
        )
        return personal

    def deploy_last(self, state: State, broadcast: Arrays, final: Arrays) -> Tensors:
        """Return the personal model after the last round.

        The round started from `broadcast` and led to `final`, in which totals of statistics are
        those of the other nodes.
        """
        if self.statistics is not None:
            own = self.tensors(self.statistics.exact(state.tensors))
            return self.statistics.deploy(own, final, served=True)
        received = final if self.deploys_final else broadcast
        return self._deploy(state.tensors, self.tensors(received))

    def predict_held_out(self, personal: Tensors, test: LabelledImages) -> np.ndarray:
        """Return a model's logits [n, classes] for the held-out images."""
        if self._held_out is None:
            torch.set_num_threads(self.spec.threads)
            data = TrainingSet.of(test, self.spec.preprocessing, self.device)
            self._held_out = data.with_stem_output(self.network, personal)
        torch.set_num_threads(self.spec.threads)
        return predict(self.network, personal, self._held_out)

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
        secret = (self._secret, digest_spec(self.spec)) if self.spec.privacy else ()
        return key_to_seed(self.spec.seed, self.node, round_, phase.name, *secret)
