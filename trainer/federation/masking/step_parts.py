"""Steps of many nodes' masks in parts, each of which fits into a message."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from broker_config.protocol.codec import MAX_MESSAGE
from broker_config.protocol.messages import MaskingStep

_FIELDS = ("members", "counted", "shares", "survivors", "signatures")
_REST = 1024  # bytes that a message needs at most beside its entries


def split(step: MaskingStep) -> list[MaskingStep]:
    """The parts of a step, in order: one, unless that is too long for a message."""
    if len(msgspec.json.encode(step)) <= MAX_MESSAGE:
        return [step]
    contents = list[dict[str, list[Any]]]()
    room = 0
    for field, entry, size in _entries(step):
        if size > room:
            contents.append({})
            room = MAX_MESSAGE - _REST
        contents[-1].setdefault(field, []).append(entry)
        room -= size
    masking_steps: list[MaskingStep] = []
    for number, content in enumerate(contents):
        masking_steps.append(
            MaskingStep(
                run=step.run,
                round=step.round,
                part=number,
                parts=len(contents),
                **{
                    field: type(getattr(step, field))(entries) for field, entries in content.items()
                },
            )
        )
    return masking_steps


def _entries(step: MaskingStep) -> Iterator[tuple[str, Any, int]]:
    """Field, entry and size of all that a step says."""
    for field in _FIELDS:
        content = getattr(step, field)
        entries = content.items() if isinstance(content, Mapping) else content
        for entry in entries:
            yield field, entry, len(msgspec.json.encode(entry))


class StepParts:
    """Parts of one coordinator's steps, as they come."""

    def __init__(self) -> None:
        self._whole: MaskingStep | None = None  # the parts that are there, in one

    def add(self, part: MaskingStep) -> MaskingStep | None:
        """The step, once its last part is there.

        One out of turn has no effect: it has come twice, or others were lost, and who asks is told
        all again.
        """
        if part.part == 0:
            self._whole = part
        elif (
            self._whole and part.part == self._whole.part + 1 and _kind(part) == _kind(self._whole)
        ):
            self._whole = _join(self._whole, part)
        else:
            return None
        if self._whole.part + 1 < self._whole.parts:
            return None
        whole = self._whole
        self._whole = None
        return replace(whole, part=0, parts=1)


def _kind(step: MaskingStep) -> tuple[object, ...]:
    return step.run, step.round, step.parts


def _join(before: MaskingStep, part: MaskingStep) -> MaskingStep:
    return replace(
        part,
        members=before.members | part.members,
        counted=before.counted + part.counted,
        shares=before.shares | part.shares,
        survivors=before.survivors + part.survivors,
        signatures=before.signatures | part.signatures,
    )
