"""Records with a checksum: masks, accounts, progress, what was audited and spent."""

from pathlib import Path

import pytest

from broker_config.storage.checksums import DamagedError, read_record, write_record

VALUE = {"run": "0123456789abcdef", "secret": "00ff", "öl": "1"}


def test_no_flipped_bit_and_no_cut_makes_another_record(tmp_path: Path) -> None:
    path = tmp_path / "masks.json"
    write_record(path, VALUE)
    whole = path.read_bytes()
    assert read_record(path, dict[str, str]) == VALUE
    changed = [whole[:size] for size in range(len(whole))]
    for position in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[position // 8] ^= 1 << position % 8
        changed.append(bytes(flipped))
    for content in changed:
        path.write_bytes(content)
        with pytest.raises(DamagedError):
            read_record(path, dict[str, str])


def test_a_record_that_never_was_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path / "masks.json", dict[str, str]) is None
