"""What a node of private federations keeps: one secret, and all that it has released."""

from pathlib import Path

import pytest

from broker_config.protocol.errors import EdgeNodeError
from trainer.federation.client.privacy_file import open_account, spent
from trainer.privacy.epsilon import spent_epsilon


def test_the_secret_is_made_once_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    assert spent(tmp_path) == 0
    first = open_account(tmp_path)
    assert len(first.secret) == 64
    assert open_account(tmp_path).secret == first.secret
    assert (tmp_path / "privacy.json").stat().st_mode & 0o777 == 0o600
    assert open_account(tmp_path / "another").secret != first.secret


def test_what_was_released_is_known_to_the_next_process_and_of_all_runs(tmp_path: Path) -> None:
    open_account(tmp_path).account.spend("a", 1, "basis", 0.5)
    again = open_account(tmp_path)
    again.account.spend("a", 1, "basis", 0.5)
    again.account.spend("b", 1, "basis", 0.5)
    assert open_account(tmp_path).account.epsilon == spent(tmp_path) == spent_epsilon(1.0)
    assert open_account(tmp_path).secret == again.secret


def test_a_damaged_account_is_refused_for_another_secret_would_say_the_same_with_other_noise(
    tmp_path: Path,
) -> None:
    open_account(tmp_path).account.spend("a", 1, "basis", 0.5)
    for file in tmp_path.glob("privacy*"):
        file.write_bytes(file.read_bytes().replace(b'"round":1', b'"round":2'))
    for read in (spent, open_account):
        with pytest.raises(EdgeNodeError, match=r"privacy\.json") as caught:
            read(tmp_path)
        assert "from a copy" in caught.value.remedy


@pytest.mark.parametrize("file", ["privacy.json", "privacy-copy.json"])
@pytest.mark.parametrize("fault", ["older", "missing", "damaged"])
def test_what_becomes_of_one_file_makes_nothing_forgotten(
    fault: str, file: str, tmp_path: Path
) -> None:
    """Also not when the other file is then replaced by its older copy."""
    account = open_account(tmp_path).account
    account.spend("a", 1, "basis", 0.5)
    older = {path: path.read_bytes() for path in tmp_path.glob("privacy*")}
    account.spend("a", 2, "basis", 0.5)
    account.confirm("a", 2, "basis", "digest")
    path = tmp_path / file
    assert path in older
    if fault == "older":
        path.write_bytes(older[path])
    elif fault == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-20])
    assert spent(tmp_path) == spent_epsilon(1.0)
    secret = open_account(tmp_path).secret
    for other, content in older.items():
        if other != path:
            other.write_bytes(content)
    again = open_account(tmp_path)
    assert again.secret == secret
    assert again.account.epsilon == spent_epsilon(1.0)
    with pytest.raises(EdgeNodeError):
        again.account.confirm("a", 2, "basis", "other bytes")


def test_no_more_is_spent_than_is_demanded_with_what_was_spent_before(tmp_path: Path) -> None:
    open_account(tmp_path).account.spend("a", 1, "basis", 1.0)
    with pytest.raises(EdgeNodeError, match="demands 5"):
        open_account(tmp_path, 5.0).account.spend("b", 1, "basis", 1.0)
