"""Audit of a federation by a plant: attacks on what its own images make it send, in each mode that there is."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec, Training
from broker_config.protocol.round_contents import count_training_rounds
from trainer.audit import model_attacks, sum_attacks
from trainer.audit.contributions import count_others, count_steps, observe
from trainer.audit.exposure import MODES, Exposure, Found, Mode, Pictures, What
from trainer.audit.observation import Observation
from trainer.audit.parts import Parts, split
from trainer.data.class_folders import Images
from trainer.federation.masking import LEAST_NODES
from trainer.federation.server.spec import Request, draft
from trainer.methods import make
from trainer.models.initial_weights import choose_weights
from trainer.models.named_tensors import Arrays
from trainer.privacy.plan import planned_epsilon
from trainer.progress import Report, Step

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
        """The attack that tells most; None if there is none."""
        return max((each for each in self.exposures if each.what == what), key=lambda each: each.told, default=None)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit has found."""

    federation: str
    method: str
    model: str
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


def audit(spec: Spec, images: Images, report: Report, seed: int = 0, *, only_actual: bool = False) -> Audited:
    """Attack what a federation would make a plant send, and what it would in its other modes.

    The first broadcast is made here, as a coordinator would with the weights that it takes by itself. What each attack
    knows, and how it is judged, is in docs/security.md.

    Args:
        spec: of the federation.
        images: the plant's, of which `train` is parted.
        report: receives the progress.
        seed: of parts and attacks.
        only_actual: whether other modes are left out.

    Raises:
        UsageError: there are too few images.
    """
    if (count := len(images.train.labels)) < LEAST_IMAGES:
        raise UsageError(
            f"{count} images are too few for an audit, which parts them: {LEAST_IMAGES} are the least",
            "label more images",
        )
    parts = split(images, seed, as_trained=False)
    broadcast = _first_broadcast(spec)
    modes: list[ModeAudit] = []
    pictures: dict[Mode, tuple[Pictures, ...]] = {}
    for mode in (find_mode(spec),) if only_actual else MODES:
        try:
            changed, first = (spec, broadcast) if mode == find_mode(spec) else _draft(spec, mode)
        except UsageError as error:
            modes.append(ModeAudit(mode=mode, is_actual=False, refused=error.what))
            continue
        steps = _Steps(report, mode, count_steps(changed))
        seen = observe(changed, first, parts.sent, seed, steps.advance)
        found = attack(seen, parts, seed, report)
        modes.append(describe_mode(changed, found, is_actual=mode == find_mode(spec)))
        pictures[mode] = tuple(each for one in found for each in one.pictures)
    return Audited(summarise(spec, parts, modes, afterwards=False), pictures)


def attack(observations: Sequence[Observation], parts: Parts, seed: int, report: Report) -> list[Found]:
    """All attacks on these observations."""
    found = []
    for seen in observations:
        spec, mode = seen.spec, find_mode(seen.spec)
        method = make(spec.method, spec.training, spec.options, spec.head, spec.privacy)
        if seen.is_statistics:
            assert method.statistics is not None
            report(Step(what=f"{mode}: attacking sums of features"))
            found.append(sum_attacks.attack(seen, method.statistics, parts, seed))
            continue
        if method.relay:
            report(Step(what=f"{mode}: attacking patches"))
            found.append(method.relay.attack(seen, parts, seed))
        if spec.sends:
            steps = _Steps(report, mode, model_attacks.STEPS, "searching for images by the model's update")
            found.append(model_attacks.attack(seen, parts, seed, steps.advance))
    return found


def summarise(spec: Spec, parts: Parts, modes: Sequence[ModeAudit], *, afterwards: bool) -> Audit:
    """The findings on a federation."""
    return Audit(
        federation=spec.federation,
        method=spec.method,
        model=spec.model,
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
        exposures=tuple(each for one in found for each in one.exposures),
        notes=tuple(each for one in found for each in one.notes),
    )


def find_mode(spec: Spec) -> Mode:
    """The mode of a federation."""
    if spec.privacy is not None:
        return "private"
    return "masked" if spec.mask_threshold else "open"


def _setting(spec: Spec) -> str:
    if spec.privacy is not None:
        return f"epsilon {planned_epsilon(spec):.3g}"
    return f"a sum of {1 + count_others(spec)} plants" if spec.mask_threshold else ""


def _request(spec: Spec) -> Request:
    usual = asdict(Training())
    training = {name: value for name, value in asdict(spec.training).items() if value != usual[name]}
    return Request(
        method=spec.method,
        options=spec.options,
        model=spec.model,
        weights="none" if spec.training.batch_norm == "train" else choose_weights(spec.model),
        size=spec.preprocessing.size,
        training=training,
        rounds=count_training_rounds(spec),
        seed=spec.seed,
        threads=spec.threads,
        head=spec.head,
    )


def _draft(spec: Spec, mode: Mode) -> tuple[Spec, Arrays]:
    """The same federation in another mode. Raises UsageError if there cannot be such."""
    request, nodes = _request(spec), spec.nodes
    if mode == "masked":
        request, nodes = request._replace(secure_aggregation=True, aggregate="mean"), max(nodes, LEAST_NODES)
    elif mode == "private":
        request = request._replace(privacy={"epsilon": _EPSILON})
    return draft(request, federation=spec.federation, classes=spec.classes, nodes=nodes, encryption="group")


def _first_broadcast(spec: Spec) -> Arrays:
    """What a federation begins with, as far as its spec tells."""
    return draft(_request(spec), federation=spec.federation, classes=spec.classes, nodes=spec.nodes)[1]


class _Steps:
    """Tells how much of a work is done, at each tenth."""

    def __init__(self, report: Report, mode: Mode, total: int, what: str = "making what the plant would send"):
        self._report, self._total, self._done = report, total, 0
        self._what = f"{mode}: {what}"
        report(Step(what=self._what))

    def advance(self) -> None:
        """One more step is done."""
        before, self._done = self._done * 10 // self._total, self._done + 1
        if (now := self._done * 10 // self._total) > before:
            self._report(Step(what=f"{self._what}: {10 * now} %"))
