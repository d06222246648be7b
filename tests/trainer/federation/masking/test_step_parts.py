"""Steps of many nodes come in messages, and to the node as one."""

import pytest

from broker_config.protocol.codec import MAX_MESSAGE, decode, encode
from broker_config.protocol.messages import MaskingStep, PublicKeys
from tests.support.wire_messages import RUN
from trainer.federation.masking.step_parts import StepParts, split

NAMES = [f"{number:064}" for number in range(1000)]


def whole(classes: int = 0) -> MaskingStep:
    """All that a step can say, of a thousand nodes with the longest names."""
    keys = PublicKeys(
        agreement="a" * 64,
        cipher="b" * 64,
        commitment="c" * 64,
        classes=tuple(range(classes)),
        signature="d" * 128,
    )
    return MaskingStep(
        run=RUN,
        round=1_000_000,
        members=dict.fromkeys(NAMES, keys),
        counted=tuple(NAMES),
        shares=dict.fromkeys(NAMES[1:], "0" * 164),
        survivors=tuple(NAMES[:700]),
        signatures=dict.fromkeys(NAMES[:700], "e" * 128),
    )


def put_together(parts: list[MaskingStep]) -> list[MaskingStep | None]:
    collected = StepParts()
    return [collected.add(part) for part in parts]


@pytest.mark.parametrize("classes", [0, 20, 1000])
def test_a_step_of_any_length_comes_whole(classes: int) -> None:
    step = whole(classes)
    parts = [decode(encode(part), MaskingStep) for part in split(step)]
    assert len(parts) > 5
    *before, last = put_together(parts)
    assert before == [None] * (len(parts) - 1)
    assert last == step


def test_a_step_that_fits_into_a_message_is_one() -> None:
    step = MaskingStep(run=RUN, round=1, survivors=tuple(NAMES))
    assert split(step) == [step]
    assert len(encode(step)) < MAX_MESSAGE
    assert put_together([step, step]) == [step, step]


def test_parts_that_come_twice_or_begin_anew_change_nothing() -> None:
    step = whole()
    parts = split(step)
    *before, last = put_together([*parts[:3], *parts[1:3], *parts[3:]])
    assert (last, {*before}) == (step, {None})
    *before, last = put_together([*parts[:3], *parts])
    assert (last, {*before}) == (step, {None})
    assert put_together([*parts, *parts[1:]])[len(parts) :] == [None] * (len(parts) - 1)


def test_without_one_of_its_parts_or_with_that_of_another_round_there_is_no_step() -> None:
    parts = split(whole())
    assert {*put_together([*parts[:2], *parts[3:]])} == {None}
    other = MaskingStep(run=RUN, round=2, part=2, parts=len(parts))
    assert {*put_together([*parts[:2], other, *parts[3:]])} == {None}
