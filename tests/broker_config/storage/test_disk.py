"""State folders that one process uses at a time, and others may ask about;
files that root makes in other people's folders; files that others may put there.
"""

import os
from pathlib import Path

import pytest

from broker_config.storage import checksums
from broker_config.storage.disk import (
    is_locked,
    lock_folder,
    make_private,
    read_regular,
    replace_bytes,
)


def test_whether_a_folder_is_used_can_be_asked_without_a_harm_to_who_uses_it(
    tmp_path: Path,
) -> None:
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    with lock_folder(tmp_path):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_writes_into_a_service_s_folder_is_the_service_s(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    for _ in range(2):
        replace_bytes(tmp_path / "accounts.json", b"{}", mode=0o600)
        made = (tmp_path / "accounts.json").stat()
        assert (made.st_uid, made.st_gid) == (12345, 12346)
        assert made.st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_that_root_makes_in_a_service_s_folder_is_the_service_s(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    for _ in range(2):
        make_private(tmp_path / "state" / "line-1")
    for made in (tmp_path / "state", tmp_path / "state" / "line-1"):
        found = made.stat()
        assert (found.st_uid, found.st_gid) == (12345, 12346)
        assert found.st_mode & 0o777 == 0o700


def test_a_pipe_in_a_file_s_place_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "state.json")
    with pytest.raises(OSError, match="pipe"):
        checksums.read_record(tmp_path / "state.json", str)
    with pytest.raises(OSError, match="pipe"):
        checksums.digest_of(tmp_path / "state.json")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "sidecar.json").write_bytes(b"12345")
    assert read_regular(tmp_path / "sidecar.json", 5) == b"12345"
    with pytest.raises(OSError, match="4 bytes"):
        read_regular(tmp_path / "sidecar.json", 4)
