"""Names of classes and files, whoever wrote them."""

import os

import msgspec
import pytest

from broker_config.protocol.errors import UsageError
from broker_config.protocol.messages import ClassName
from broker_config.protocol.names import (
    LONGEST_CLASS,
    check_class_name,
    is_class_name,
    show_name,
)

POSSIBLE = [
    "scratches",
    "no defect",
    "Kratzer (tief), Öl & Rost",
    "лом",
    "划痕",
    "1.5",
    "-1",
    "a.b",
    " leading and trailing ",
    "#1; rm -rf",
    "🔧",
    "x" * LONGEST_CLASS,
]
IMPOSSIBLE = [
    "",
    ".",
    "..",
    ".hidden",
    "../../outside",
    "/etc/x",
    "a/b",
    "a\\b",
    "a\nverified: fine",
    "a\rb",
    "a\tb",
    "a\0",
    "\x1b[31m",
    "\x7f",
    "\x9b31m",
    "a\u2028b",
    "a\u202eb",
    "a\u2066b",
    "\ufeffa",
    "x" * (LONGEST_CLASS + 1),
]


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_class_may_be_called_what_a_folder_may(name: str) -> None:
    assert is_class_name(name)
    assert check_class_name(name) == name
    assert msgspec.json.decode(msgspec.json.encode(name), type=ClassName) == name


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_name_that_leads_out_of_its_folder_or_moves_the_cursor_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as told:
        check_class_name(name)
    assert told.value.what.isprintable()
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(name), type=ClassName)


def test_a_folder_s_name_in_another_encoding_is_no_class_s() -> None:
    assert not is_class_name(os.fsdecode(b"Kratzer_\xe4"))
    assert not is_class_name("a\ud800")


@pytest.mark.parametrize("name", [b"Kratzer_\xe4", b"\xff\xfe", b"a\x1b[2Jb\nc", "Öl".encode()])
def test_a_file_s_name_is_shown_in_one_line_of_utf_8(name: bytes) -> None:
    shown = show_name(os.fsdecode(name))
    assert shown.isprintable()
    assert shown.encode()
