"""Audit of a federation by a plant: attacks on what its own images make it send,
in each mode that there is.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.protocol.round_contents import count_training_rounds
from edge_node.extensions.audit import model_attacks, patch_attacks, sum_attacks
from edge_node.extensions.audit.contributions import (
    audited_rounds,
    count_others,
    count_steps,
    observe,
)
from edge_node.extensions.audit.exposure import MODES, Exposure, Found, Mode, Pictures, What
from edge_node.extensions.audit.observation import Observation
from edge_node.extensions.audit.parts import Parts, split
from trainer.data.class_folders import Images
from trainer.federation.masking import LEAST_NODES
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.methods.base import weigh_by_images
from trainer.models.initial_weights import choose_weights
from trainer.models.named_tensors import Arrays
from trainer.progress import Report, Step
from trainer.progress.long_work import Stopped, watched
from trainer.statistics.features import remembering_features
from trainer.training.privacy_plan import planned_epsilon

LEAST_IMAGES = 8
"""Fewer cannot be parted into what is sent, what is not, and what an attacker knows."""
_EPSILON = "3"  # of a federation that is not private, as it might be


class ModeAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What one mode of a federation tells of the plant's images."""

    mode: Mode
    is_actual: bool  # whether the federation works so
    refused: str = ""  # why it cannot; there are no figures then
    setting: str = ""  # nodes of a sum, epsilon
    exposures: tuple[Exposure, ...] = ()
    notes: tuple[str, ...] = ()

    def worst(self, what: What) -> Exposure | None:
        """The attack that tells most surely; None if there is none."""
        found = (each for each in self.exposures if each.what == what)
        return max(found, key=lambda each: (each.told_surely, each.told), default=None)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit has found."""

    federation: str
    method: str
    model: str
    nodes: int
    software: str  # version of edge-node
    afterwards: bool  # whether what a node has sent was attacked, instead of what it would send
    sent: int  # images
    unsent: int
    known: int  # to the attacker
    modes: tuple[ModeAudit, ...]

    @property
    def actual(self) -> ModeAudit:
        """The mode in which the federation works."""
        return next(each for each in self.modes if each.is_actual)


class Audited(NamedTuple):
    """An audit, and the pictures that the attacks have made by mode."""

    audit: Audit
    pictures: dict[Mode, tuple[Pictures, ...]]


def audit(
    spec: Spec,
    images: Images,
    report: Report,
    seed: int = 0,
    *,
    only_actual: bool = False,
    is_thorough: bool = False,
    stop: Callable[[], bool] = lambda: False,
    first: Arrays | None = None,
) -> Audited:
    """Attack what a federation would make a plant send, and what it would in its other modes.

    Unless the `first` broadcast is there, it is made as a coordinator would with the weights that
    it takes by itself. What each attack knows, and how it is judged, is in docs/security.md.

    Args:
        spec: of the federation.
        images: the plant's, of which `train` is parted.
        report: receives the progress.
        seed: of parts and attacks.
        only_actual: whether other modes are left out.
        is_thorough: whether the search for images makes all its steps, however long that takes.
        stop: asked often.
        first: the broadcast that the federation begins with.

    Raises:
        UsageError: there are too few images.
        Stopped: `stop` returned true.
    """
    if (count := len(images.train.labels)) < LEAST_IMAGES:
        raise UsageError(
            f"{count} images are too few for an audit, which parts them: {LEAST_IMAGES} are the "
            "least",
            "label more images",
        )
    with watched(report, stop), remembering_features():
        return _audit(spec, images, report, seed, stop, only_actual, is_thorough, first)


def _audit(
    spec: Spec,
    images: Images,
    report: Report,
    seed: int,
    stop: Callable[[], bool],
    only_actual: bool,
    is_thorough: bool,
    first: Arrays | None,
) -> Audited:
    parts = split(images, seed, as_trained=False)
    broadcast = make_first_broadcast(spec) if first is None else first
    modes: list[ModeAudit] = []
    pictures: dict[Mode, tuple[Pictures, ...]] = {}
    chosen_modes = (find_mode(spec),) if only_actual else MODES
    for mode in chosen_modes:
        try:
            changed, first = (spec, broadcast) if mode == find_mode(spec) else _draft(spec, mode)
        except UsageError as error:
            modes.append(ModeAudit(mode=mode, is_actual=False, refused=error.what))
            continue
        steps = _Steps(report, stop, mode, "making what the plant would send", count_steps(changed))
        seen = observe(changed, first, parts.sent, seed, steps.advance)
        found = attack(seen, parts, seed, report, stop, is_thorough=is_thorough)
        modes.append(describe_mode(changed, found, is_actual=mode == find_mode(spec)))
        pictures[mode] = tuple(chain.from_iterable(one.pictures for one in found))
    return Audited(summarise(spec, parts, modes, afterwards=False), pictures)


def attack(
    observations: Sequence[Observation],
    parts: Parts,
    seed: int,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
    *,
    is_thorough: bool = False,
) -> list[Found]:
    """All attacks on these observations; the rest is as in `audit`."""
    found = []
    for seen in observations:
        spec = seen.spec
        mode = find_mode(seen.spec)
        method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
        if seen.is_statistics:
            assert method.statistics is not None
            _Steps(report, stop, mode, "attacking sums of features")
            found.append(sum_attacks.attack(seen, method.statistics, parts, seed))
            continue
        if method.relay and method.relay.patches:
            _Steps(report, stop, mode, "attacking patches")
            found.append(patch_attacks.attack(seen, parts, method.relay.patches, seed))
        elif method.relay:
            note = "no attack on what nodes see of one another was tried: it is not patches of maps"
            found.append(Found((), notes=(note,)))
        if spec.sends and method.only_mean:
            found.append(
                Found(
                    (),
                    notes=(
                        f"no attack on what it sends beside sums was tried: {method.only_mean}",
                    ),
                )
            )
        elif spec.sends:
            count = model_attacks.STEPS if is_thorough else model_attacks.affordable_steps(seen)
            steps = _Steps(
                report,
                stop,
                mode,
                "searching for images by the model's update",
                count,
            )
            found.append(model_attacks.attack(seen, parts, seed, steps.advance, count))
            if method.weigh is weigh_by_images and mode != "masked":
                found.append(
                    Found(
                        (),
                        notes=(
                            f"its weight tells that the plant has {len(parts.sent.labels)} images",
                        ),
                    )
                )
    return found


def summarise(spec: Spec, parts: Parts, modes: Sequence[ModeAudit], *, afterwards: bool) -> Audit:
    """The findings on a federation."""
    return Audit(
        federation=spec.federation,
        method=spec.method,
        model=spec.model,
        nodes=spec.nodes,
        software=importlib.metadata.version("edge-node"),
        afterwards=afterwards,
        sent=len(parts.sent.labels),
        unsent=len(parts.unsent.labels),
        known=len(parts.known.labels),
        modes=tuple(modes),
    )


def describe_mode(spec: Spec, found: Sequence[Found], *, is_actual: bool) -> ModeAudit:
    """The findings on one mode."""
    return ModeAudit(
        mode=find_mode(spec),
        is_actual=is_actual,
        setting=_setting(spec),
        exposures=tuple(chain.from_iterable(one.exposures for one in found)),
        notes=tuple(chain.from_iterable(one.notes for one in found)),
    )


def find_mode(spec: Spec) -> Mode:
    """The mode of a federation."""
    if spec.privacy is not None:
        return "private"
    return "masked" if spec.mask_threshold else "open"


def _setting(spec: Spec) -> str:
    if spec.privacy is not None:
        return f"epsilon {planned_epsilon(spec):.3g}"
    sums = sorted({1 + count_others(spec, round_) for round_ in audited_rounds(spec)})
    return f"sums of {' and '.join(map(str, sums))} plants" if spec.mask_threshold else ""


def _request(spec: Spec) -> Request:
    weights = "none" if spec.training.batch_norm == "train" else choose_weights(spec.model)
    return Request(
        method=spec.method,
        options=spec.options,
        model=spec.model,
        weights=weights,
        size=spec.preprocessing.size,
        training=asdict(spec.training),
        rounds=count_training_rounds(spec),
        seed=spec.seed,
        threads=spec.threads,
        head=spec.head,
        codec=spec.codec,
    )


def _draft(spec: Spec, mode: Mode) -> tuple[Spec, Arrays]:
    """The same federation in another mode. Raises UsageError if there cannot be such."""
    request = _request(spec)
    nodes = spec.nodes
    if mode == "masked":
        request = request._replace(secure_aggregation=True, aggregate="mean", codec="none")
        nodes = max(nodes, LEAST_NODES)
    elif mode == "private":
        request = request._replace(privacy={"epsilon": _EPSILON})
    made, first = draft(
        request, federation=spec.federation, classes=spec.classes, nodes=nodes, encryption="group"
    )
    return replace(made, run=spec.run), first  # noise depends on it


def make_first_broadcast(spec: Spec) -> Arrays:
    """Return what a federation begins with, as far as its spec tells.

    The weights are those that a coordinator takes by itself.
    """
    return draft(
        _request(spec), federation=spec.federation, classes=spec.classes, nodes=spec.nodes
    )[1]


class _Steps:
    """Tells how much of a work is done, at each tenth, and ends it when `stop` says so."""

    def __init__(
        self, report: Report, stop: Callable[[], bool], mode: Mode, what: str, total: int = 1
    ):
        self._report = report
        self._stop = stop
        self._total = total
        self._done = 0
        self._what = f"audit, {mode}: {what}"
        report(Step(what=self._what))
        self._check()

    def _check(self) -> None:
        if self._stop():
            raise Stopped

    def advance(self) -> None:
        """One more step is done."""
        self._check()
        before = self._done * 10 // self._total
        self._done = self._done + 1
        if (now := self._done * 10 // self._total) > before:
            self._report(Step(what=f"{self._what}: {10 * now} %"))
