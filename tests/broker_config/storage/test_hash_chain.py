"""A hash chain: no entry changes, goes, comes or moves unnoticed,
and nothing hostile gets further than a message.
"""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.messages import RecordHead
from broker_config.storage.hash_chain import LARGEST, ChainError, chain, encode, follow, read_lines

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abé", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
FACTS = st.lists(
    st.dictionaries(st.sampled_from(["what", "run", "ä"]), VALUES), min_size=1, max_size=6
)


def head_of(lines: list[bytes]) -> RecordHead:
    return [head for _, head in follow(lines)][-1]


@given(FACTS)
def test_what_was_chained_is_followed_to_the_same_head(facts: list[dict[str, Any]]) -> None:
    chained = list(chain(facts))
    followed = list(follow(line for line, _ in chained))
    assert [head for _, head in followed] == [head for _, head in chained]
    assert [
        {name: value for name, value in entry.items() if name not in ("number", "before")}
        for entry, _ in followed
    ] == facts


@given(FACTS, st.data())
def test_any_entry_that_is_changed_removed_swapped_or_inserted_is_noticed(
    facts: list[dict[str, Any]], data: st.DataObject
) -> None:
    lines = [line for line, _ in chain(facts)]
    place = data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines) - 1))
    forged = [*lines]
    match data.draw(
        st.sampled_from(["a byte", "a value", "removed", "swapped", "inserted", "doubled"])
    ):
        case "a byte":
            at = data.draw(st.integers(0, len(lines[place]) - 1))
            forged[place] = (
                lines[place][:at]
                + bytes([lines[place][at] ^ 1 << data.draw(st.integers(0, 7))])
                + lines[place][at + 1 :]
            )
        case "a value":
            forged[place] = encode({**json.loads(lines[place]), "what": data.draw(VALUES)})
        case "removed":
            del forged[place]
        case "swapped":
            forged[place], forged[other] = forged[other], forged[place]
        case "inserted":
            forged.insert(place, encode(data.draw(st.dictionaries(st.text("ab"), VALUES))))
        case "doubled":
            forged.insert(place, lines[other])
    if forged == lines:
        return
    if forged[: len(lines) - 1] != lines[:-1]:
        with pytest.raises(ChainError, match=r"line \d"):
            list(follow(forged))
    else:  # the newest entry: whoever knows the head notices
        with suppress(ChainError):
            assert [head for _, head in follow(forged)] != [head for _, head in chain(facts)]


def test_a_chain_is_that_of_sha256_and_json_alone() -> None:
    lines = [line for line, _ in chain([{"what": "ä", "n": 1.5}, {"what": "b"}])]
    assert lines[0] == '{"before":"","n":1.5,"number":1,"what":"ä"}'.encode()
    assert json.loads(lines[1]) == {
        "before": hashlib.sha256(lines[0]).hexdigest(),
        "number": 2,
        "what": "b",
    }


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b"null",
        b'{"a":' * 100_000,
        b"[" * 1_000_000,
        b"x" * (LARGEST + 1),
        *(
            b'{"before":"",' + rest.encode()
            for rest in (
                '"a":NaN,"number":1}',
                '"a":1e999,"number":1}',
                '"a": 1,"number":1}',
                '"number":1,"a":1}',
                '"a":1,"a":2,"number":1}',
                '"a":1.0e0,"number":1}',
                '"a":"\\u00e4","number":1}',
                '"a":"\\ud800","number":1}',
                '"a":' + "9" * 5000 + ',"number":1}',
                '"number":1,"number":1}',
                '"number":1}\r',
                '"number":1}{}',
                '"number":1}\0',
            )
        ),
        '{"before":"","number":1}'.encode("utf-16"),
    ],
    ids=lambda line: repr(line[:40]),
)
def test_a_hostile_line_is_refused(line: bytes) -> None:
    with pytest.raises(ChainError, match="line 1"):
        list(follow([line]))


@pytest.mark.parametrize(
    "fields",
    [
        {"number": True},
        {"number": 1.0},
        {"number": "1"},
        {"number": 2},
        {"before": 3},
        {"before": "a" * 64},
    ],
)
def test_a_first_entry_of_another_number_or_hash_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match="line 1"):
        list(follow([encode({"number": 1, "before": "", **fields})]))


@pytest.mark.parametrize("size", [LARGEST + 2, 1 << 40])
def test_of_a_file_that_is_too_large_or_never_ends_a_line_little_is_read(
    tmp_path: Path, size: int
) -> None:
    path = tmp_path / "record"
    with path.open("wb") as file:
        file.truncate(size)  # sparse
    with pytest.raises(ChainError, match="bytes"):
        list(read_lines(path))


def test_a_pipe_under_a_records_name_keeps_nobody_waiting(tmp_path: Path) -> None:

    os.mkfifo(tmp_path / "record")
    with pytest.raises(OSError, match="pipe"):
        list(read_lines(tmp_path / "record"))
