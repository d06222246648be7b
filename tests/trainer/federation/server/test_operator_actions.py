"""An operator's actions are on the disk before they hold, are read once and in order,
and amount to one thing.
"""

from pathlib import Path

import pytest

from broker_config.protocol.errors import EdgeNodeError
from trainer.federation.server.operator_actions import (
    FILE,
    ActionReader,
    Control,
    Kind,
    act,
    make_action,
    replay,
)

RUN, OTHER = "0123456789abcdef", "f" * 16


def amount(*wanted: tuple[Kind, str | None], most_dropped: int = 2) -> Control:
    return replay([make_action(RUN, what, "anna", node) for what, node in wanted], most_dropped)


def test_who_reads_gets_each_action_on_the_run_once(tmp_path: Path) -> None:
    reader = ActionReader(tmp_path, RUN)
    assert reader.read() == []
    actions = [make_action(RUN, "pause", "anna"), make_action(RUN, "drop", "bert", "plant-a")]
    for action in actions:
        act(tmp_path, action)
    act(tmp_path, make_action(OTHER, "abort", "anna"))
    assert reader.read() == actions
    assert reader.read() == []
    assert ActionReader(tmp_path, RUN).read() == actions  # another process: from the beginning


def test_only_the_folder_s_owner_can_act(tmp_path: Path) -> None:
    act(tmp_path, make_action(RUN, "pause", "anna"))
    assert (tmp_path / FILE).stat().st_mode & 0o077 == 0


def test_an_action_that_was_torn_by_a_power_cut_harms_no_other(tmp_path: Path) -> None:
    first, second = make_action(RUN, "pause", "anna"), make_action(RUN, "resume", "anna")
    act(tmp_path, first)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content + content[: len(content) // 2])
    act(tmp_path, second)
    assert ActionReader(tmp_path, RUN).read() == [first, second]


def test_no_flipped_bit_changes_what_an_operator_has_done(tmp_path: Path) -> None:
    act(tmp_path, make_action(RUN, "drop", "anna", "plant-a"))
    act(tmp_path, make_action(RUN, "pause", "anna"))
    whole = (tmp_path / FILE).read_bytes()
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        (tmp_path / FILE).write_bytes(flipped)
        with pytest.raises(EdgeNodeError, match=FILE):
            ActionReader(tmp_path, RUN).read()


def test_actions_that_are_gone_are_missed(tmp_path: Path) -> None:
    act(tmp_path, make_action(RUN, "drop", "anna", "plant-a"))
    (tmp_path / FILE).unlink()
    with pytest.raises(EdgeNodeError, match=FILE):
        ActionReader(tmp_path, RUN).read()
    with pytest.raises(EdgeNodeError, match=FILE):
        act(tmp_path, make_action(RUN, "pause", "anna"))


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(EdgeNodeError, match=FILE):
        ActionReader(tmp_path, RUN).read()
    with pytest.raises(EdgeNodeError, match="cannot write"):
        act(tmp_path, make_action(RUN, "pause", "anna"))


def test_the_last_of_pause_and_resume_holds() -> None:
    assert amount(("pause", None), ("pause", None)).is_paused
    assert not amount(("pause", None), ("resume", None)).is_paused


def test_dropped_nodes_add_up_until_too_few_would_be_left() -> None:
    assert amount(("drop", "a"), ("drop", "a"), ("drop", "b"), ("drop", "c")).dropped == {"a", "b"}
    assert amount(("drop", "a"), most_dropped=0).dropped == set()
    assert amount(("drop", None)) == Control()


def test_a_run_is_aborted_by_whoever_did_it_first() -> None:
    actions = [make_action(RUN, "abort", by) for by in ("anna", "bert")]
    assert replay(actions, 1).aborted == actions[0]
