"""State folders that one process uses at a time, and others may ask about;
files that root makes in other people's folders.
"""

import os
from pathlib import Path

import pytest

from broker_config.storage.disk import is_locked, lock_folder, replace_bytes


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
