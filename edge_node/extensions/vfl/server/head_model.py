"""The head's model: training, the replies to each round, checkpoints, deployment."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from broker_config.protocol.errors import UsageError
from edge_node.extensions.vfl import tensor_frames
from edge_node.extensions.vfl.algorithm import Head, Representation, diverged_error
from edge_node.extensions.vfl.checkpoint import Checkpoints, strip_prefix
from edge_node.extensions.vfl.denoiser import sends_pairs
from edge_node.extensions.vfl.frames import LARGEST_FRAME, PART, Graded, Represented
from edge_node.extensions.vfl.messages import VflSpec
from edge_node.extensions.vfl.networks import embedding_size
from edge_node.extensions.vfl.policies.policy import Timing
from edge_node.extensions.vfl.policies.selection import make_policy
from edge_node.extensions.vfl.server.absence import make_absence_rule
from edge_node.extensions.vfl.server.head_state import PartyProgress
from edge_node.extensions.vfl.server.journal import ClosedRound, Journal
from edge_node.extensions.vfl.server.labels import Labels
from edge_node.extensions.vfl.server.progressive_validation import ProgressiveValidation
from edge_node.extensions.vfl.server.round_state import OpenRound


class Deploy(Protocol):
    """Deployment of a head: called after each round, again and again while none is played,
    and at the end.
    """

    def __call__(
        self, spec: VflSpec, round_: int, head: Head, embeddings: Sequence[Tensor], *, last: bool
    ) -> None:
        """`embeddings` [N, D_k] are the last round's, denoised;
        with the `last` call this process ends, or the run.
        """


class RoundInputs(NamedTuple):
    """Inputs of training in a round."""

    phi: Representation
    labels: Tensor  # int64 [N]
    iterations: tuple[int, ...]  # E_{t,k}


class HeadModel:
    """The model of the head in training. `round` is the last one that it was trained on."""

    def __init__(
        self,
        spec: VflSpec,
        columns: Mapping[str, int],
        labels: Labels,
        folder: Path,
        journal: Journal,
        warn: Callable[[str], None],
        deploy: Deploy,
    ):
        self.spec = spec
        self.labels = labels
        self._journal = journal
        self.sizes = {
            name: embedding_size(spec.network, (columns[name], spec.cycles))
            for name in spec.sensors
        }
        if (
            size := 4 * len(spec.classes) * (1 + sum(self.sizes.values()))
        ) > LARGEST_FRAME - 2 * PART:
            raise UsageError(
                f"the head's weights take {size} bytes, too many for a frame",
                "take fewer classes, or fewer sensors",
            )
        self._checkpoints = Checkpoints(folder / spec.run, warn, begun=journal.has_rounds(spec.run))
        self._decide = make_policy(spec.policy, spec.iterations, len(spec.sensors), warn)
        self._deploy = deploy
        self._warn = warn
        self._closed: list[ClosedRound] = []  # that are not on the disk yet
        self.round = 0
        self.restore(max(self._checkpoints.rounds))

    @property
    def progress(self) -> PartyProgress:
        """Training progress of the head."""
        return PartyProgress(self.round, self._checkpoints.rounds)

    def restore(self, round_: int) -> None:
        """Go back to the end of a round; what came after it is void."""
        self._checkpoints.drop(round_ + 1)
        self._embeddings: tuple[Tensor, ...] = ()  # of the last round, denoised
        self._closed = [each for each in self._closed if each.round <= round_]
        spec = self.spec
        sizes = list(self.sizes.values())
        self.head = Head(sizes, len(spec.classes), spec.denoising, spec.recipe, spec.seed)
        self.absence = make_absence_rule(spec.absent, sizes)
        self.validation = ProgressiveValidation(spec)
        self.round = round_
        if round_:
            state = self._checkpoints.load(round_)
            self.head.model.load_state_dict(strip_prefix("head.", state))
            self.head.denoiser.restore(strip_prefix("denoiser.", state))
            if self.absence:
                self.absence.restore(strip_prefix("absence.", state))

    def represent(
        self, collecting: OpenRound, first: int, last: int, timing: Timing
    ) -> RoundInputs:
        """Make the inputs of training from what has arrived.

        Sensors without products take no local iterations.

        Raises:
            EdgeNodeError: the head has diverged, before a sensor learns of that.
        """
        received, present = collecting.assemble()
        self._denoise(collecting, received, present.all(1))
        phi = self.head.represent(received)
        if self.absence:
            phi = phi._replace(
                embeddings=tuple(self.absence.substitute(first, phi.embeddings, present))
            )
        labels = torch.from_numpy(self.labels.labels(first, last))
        if not all(each.isfinite().all() for each in phi.embeddings):
            raise diverged_error("the head")
        decided = self._decide(timing, collecting.round)
        iterations = tuple((decided * present.any(0).numpy()).tolist())
        return RoundInputs(phi, labels, iterations)

    def _denoise(self, collecting: OpenRound, received: Sequence[Tensor], whole: Tensor) -> None:
        """Let the denoiser learn from the products [N] of which every sensor has sent both
        copies.
        """
        settings = self.spec.denoising
        round_ = collecting.round
        if sends_pairs(settings, round_) and whole.sum() > 1:
            second = [collecting.arrived[name].second for name in self.spec.sensors]
            self.head.denoiser.train(
                [each[whole] for each in received],
                [each[whole] for each in second if each is not None],
            )
        if round_ == settings.rounds and self.head.denoiser.plain_layers(0) is None:
            self._warn(
                "the denoiser has learnt nothing: in its rounds no product had embeddings of "
                "all sensors"
            )

    def replies(
        self, inputs: RoundInputs, **frame: Any
    ) -> Iterator[tuple[str | None, Represented | Graded]]:
        """The frames of a round's reply, and the sensor that each is for; None: for all."""
        if self.spec.labels == "shared":
            for each in tensor_frames.representation_frames(
                inputs.phi, inputs.labels, inputs.iterations, **frame
            ):
                yield None, each
            return
        grades = zip(
            self.head.gradients(inputs.phi, inputs.labels),
            self.head.curvatures(inputs.phi),
            strict=True,
        )
        for name, grade, steps in zip(self.spec.sensors, grades, inputs.iterations, strict=True):
            for part in tensor_frames.gradient_frames(*grade, steps, **frame):
                yield name, part

    def train(
        self,
        inputs: RoundInputs,
        round_: OpenRound,
        positions: tuple[int, int],
        seconds: float,
        costs: Mapping[str, tuple[float, float, float]],
    ) -> ClosedRound:
        """Take the head's local iterations. A group of rounds ends on the disk.

        `seconds` the round took, and `costs` (collection, communication, iteration) are those of
        its sensors.
        """
        logits = self.head.logits(inputs.phi.embeddings)
        loss = torch.nn.functional.cross_entropy(logits, inputs.labels).item()
        if self.round:
            new = positions[1] - max(positions[0], self.spec.window.span(self.round)[1])
            self.validation.add(logits[-new:], inputs.labels[-new:])
        self.head.train(
            inputs.phi, inputs.labels, self.spec.steps_of_head(inputs.iterations), round_.round
        )
        by_kind = []
        for which in range(3):
            by_kind.append({name: costs[name][which] for name in round_.arrived})
        collection, communication, iteration = by_kind
        closed = ClosedRound(
            round=round_.round,
            attempt=round_.attempt,
            first=positions[0],
            last=positions[1],
            iterations=inputs.iterations,
            loss=loss,
            rmse=root_mean_square_error(logits, inputs.labels, self.spec),
            validation=self.validation.score(),
            seconds=seconds,
            collection=collection,
            communication=communication,
            iteration=iteration,
        )
        self.round = closed.round
        self._embeddings = inputs.phi.embeddings
        self._closed.append(closed)
        if self.round % self.spec.commit == 0:
            self.commit()
        self.deploy(last=False)
        return closed

    def deploy(self, *, last: bool) -> None:
        """Deploy the model as it is; `last`: there will be no other."""
        if self._embeddings:
            self._deploy(self.spec, self.round, self.head, self._embeddings, last=last)

    def commit(self) -> None:
        """Save the closed rounds and a checkpoint, unless it exists already."""
        self._journal.close_rounds(self.spec.run, self._closed)
        self._closed.clear()
        if self.round not in self._checkpoints.rounds:
            state_or_empty = self.absence.state() if self.absence else {}
            parts = {
                "head.": self.head.model.state_dict(),
                "denoiser.": self.head.denoiser.state(),
                "absence.": state_or_empty,
            }
            state = {}
            for prefix, part in parts.items():
                for name, value in part.items():
                    state[prefix + name] = value
            self._checkpoints.save(self.round, state)


def root_mean_square_error(logits: Tensor, labels: Tensor, spec: VflSpec) -> float | None:
    """That of the mean of the classes under their probabilities;
    None where classes are no numbers.
    """
    if spec.reading != "expectation":
        return None
    numbers = torch.tensor([float(name) for name in spec.classes])
    return (logits.softmax(1) @ numbers - numbers[labels]).square().mean().sqrt().item()


def timing(sensors: Sequence[str], times: Mapping[str, tuple[float, float, float]]) -> Timing:
    """Collection, communication and iteration of each sensor, seconds;
    zeros for one of which nothing is known.
    """
    rows = np.array([times.get(name, (0.0, 0.0, 0.0)) for name in sensors])
    return Timing(*rows.T)
