"""State folders that one process uses at a time, and others may ask about."""

from pathlib import Path

from broker_config.storage.disk import is_locked, lock_folder


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
