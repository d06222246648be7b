"""Plant checks: what a plant demands of a federation (`--demand NAME=VALUE`),
checked before anything of its images leaves it.

A package registers a kind of demands as an entry point of the group `edge_node.plant_checks`, as
the kernel does:

    [project.entry-points."edge_node.plant_checks"]
    sums = "trainer.federation.client.demands:SumsCheck"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import Spec
from broker_config.registry import Registry
from broker_config.security.one_time import bind, digest_spec
from trainer import progress
from trainer.data.class_folders import Images
from trainer.federation.client import checkpoint
from trainer.federation.client.plant_images import digest_groups, digest_images
from trainer.methods.base import Method
from trainer.models.named_tensors import Arrays
from trainer.progress.long_work import Stopped


class PlantCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of demands: each field is the name of one, UNSET where the plant does not make it.

    A function raises UsageError where a federation does not meet what the plant demands. Those
    that a subclass does not define find nothing wrong. No module of a subclass imports torch,
    except inside functions: a node that may not take part should hear so at once.

    >>> class RoundsCheck(PlantCheck, frozen=True):
    ...     remedy = "demand rounds=N"
    ...     rounds: int | UnsetType = UNSET  # in which it trains at most
    ...
    ...     def check_spec(self, spec: Spec, method: Method) -> None:
    ...         if self.rounds is not UNSET and spec.rounds > self.rounds:
    ...             raise UsageError(f"{spec.federation!r} trains too long", "demand more rounds")
    """

    remedy: ClassVar[str]
    """What to do where a value cannot be read: an example of a demand."""

    passed_file: ClassVar[str] = ""
    """A file in the node's state folder that remembers that `check_images` has passed.

    A check that takes long has one, so that a node that starts again need not wait again.
    """

    @property
    def demanded(self) -> dict[str, Any]:
        """The demands that the plant makes, by name."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not UNSET}

    @property
    def most_epsilon(self) -> float:
        """The epsilon that may be spent of each image, together with what was spent before."""
        return inf

    def check_spec(self, spec: Spec, method: Method) -> None:
        """Check the federation's spec, before the plant's images are read."""

    def check_images(
        self,
        spec: Spec,
        images: Images,
        report: progress.Report,
        stop: Callable[[], bool],
    ) -> None:
        """Check what would be told of the plant's images, before the node joins.

        Raises:
            UsageError: more than the plant demands.
            Stopped: `stop` returned true.
        """

    def digest_basis(self, spec: Spec) -> str:
        """Return a digest of all that `check_images` depends on besides its arguments and the
        demands. What has passed counts only while this is the same.
        """
        return ""

    def check_begin(
        self,
        spec: Spec,
        images: Images,
        broadcast: Arrays,
        round_: int,
        stop: Callable[[], bool],
        *,
        is_newcomer: bool,
    ) -> None:
        """Check the tensors that a process's first round begins with, before it trains.

        Args:
            spec: of the federation.
            images: the plant's.
            broadcast: what the round begins with, as far as training takes it.
            round_: its number.
            stop: asked often.
            is_newcomer: whether the node has contributed to no round of this run.

        Raises: as `check_images`.
        """


PLANT_CHECKS: Registry[type[PlantCheck]] = Registry("plant_checks")


def read_demands(demanded: Mapping[str, str]) -> dict[str, PlantCheck]:
    """Return the checks that a plant's demands, NAME=VALUE, ask for, as they are registered.

    Raises:
        UsageError: no check understands a name, or a value cannot be read.
    """
    if not demanded:
        return {}
    kinds = dict(PLANT_CHECKS)
    known = set(chain.from_iterable(kind.__struct_fields__ for kind in kinds.values()))
    if unknown := sorted(demanded.keys() - known):
        raise UsageError(
            f"nothing here can check what this node demands: {', '.join(unknown)}",
            f"demand {', '.join(sorted(known))}, or install the package that knows the name",
        )
    checks = {}
    for registered, kind in kinds.items():
        own = {name: demanded[name] for name in kind.__struct_fields__ if name in demanded}
        if not own:
            continue
        try:
            checks[registered] = msgspec.convert(own, kind, strict=False)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"what this node demands cannot be met: {error}", kind.remedy
            ) from error
    return checks


def check_images(
    checks: Mapping[str, PlantCheck],
    spec: Spec,
    images: Images,
    state: Path,
    report: progress.Report,
    stop: Callable[[], bool],
) -> bool:
    """Check what a federation would be told of a plant's images, before they leave it.

    Return False if `stop` said so.

    Raises:
        UsageError: more than the plant demands.
    """
    # The quick ones first: nobody should wait for a refusal that needs no time.
    in_order = sorted(checks.items(), key=lambda each: bool(each[1].passed_file))
    try:
        for registered, check in in_order:
            if check.passed_file:
                _check_once(registered, check, spec, images, state, report, stop)
            else:
                check.check_images(spec, images, report, stop)
    except Stopped:
        return False
    return True


def _check_once(
    registered: str,
    check: PlantCheck,
    spec: Spec,
    images: Images,
    state: Path,
    report: progress.Report,
    stop: Callable[[], bool],
) -> None:
    """Check the images unless the same check has passed before, and write down that it has.

    It has passed for this spec, these demands, images and groups, and this basis alone: a
    coordinator could otherwise have one thing checked, and ask for another.
    """
    report(progress.Step(what="checking what this plant demands, which can take minutes"))
    demanded = msgspec.json.encode(sorted(check.demanded.items()))
    digest = bind(
        registered,
        digest_spec(spec),
        demanded,
        digest_images(images.train),
        digest_groups(images.train),
        check.digest_basis(spec),
    )
    if checkpoint.has_passed(state, check.passed_file, digest):
        return
    check.check_images(spec, images, report, stop)
    checkpoint.save_passed(state, check.passed_file, digest)
