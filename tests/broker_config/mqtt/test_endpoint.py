"""The broker's address, as a user types it."""

from pathlib import Path

import pytest

from broker_config.mqtt.client import Endpoint
from broker_config.protocol.errors import UsageError


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mqtt://plant", ("mqtt", "plant", 1883, None, None)),
        ("mqtts://plant", ("mqtts", "plant", 8883, None, None)),
        ("ws://plant", ("ws", "plant", 80, None, None)),
        ("wss://plant", ("wss", "plant", 443, None, None)),
        ("mqtt://10.0.0.7:1884/", ("mqtt", "10.0.0.7", 1884, None, None)),
        ("mqtts://[::1]:8884", ("mqtts", "::1", 8884, None, None)),
        ("mqtt://anna@plant", ("mqtt", "plant", 1883, "anna", None)),
        ("mqtt://anna:p%40ss:w%2Frd@plant:7", ("mqtt", "plant", 7, "anna", "p@ss:w/rd")),
    ],
)
def test_an_address_is_read(url: str, expected: tuple[object, ...]) -> None:
    endpoint = Endpoint.parse(url)
    assert (
        endpoint.scheme,
        endpoint.host,
        endpoint.port,
        endpoint.username,
        endpoint.password,
    ) == expected


@pytest.mark.parametrize(
    ("url", "path"),
    [("wss://plant", "/mqtt"), ("wss://plant/", "/mqtt"), ("ws://plant:8083/a/b", "/a/b")],
)
def test_a_websocket_has_a_path(url: str, path: str) -> None:
    assert Endpoint.parse(url).path == path


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("plant:1883", "did you mean mqtt://plant:1883"),
        ("", "no scheme"),
        ("mqt://plant", "did you mean mqtt://"),
        ("mqttss://plant", "did you mean mqtts://"),
        ("https://plant", "did you mean mqtts://"),
        ("http://plant", "did you mean mqtt://"),
        ("wsss://plant", "did you mean wss://"),
        ("mqtt://", "cannot be read"),
        ("mqtt://plant:0", "cannot be read"),
        ("mqtt://plant:99999", "cannot be read"),
        ("mqtt://plant:port", "cannot be read"),
        ("mqtt://[::1", "cannot be read"),
        ("mqtt://plant/path", "cannot be read"),
        ("wss://plant/mqtt?token=1", "cannot be read"),
        ("mqtt://:secret@plant", "no user name"),
        ("anna:secret@plant", "did you mean mqtt://anna@plant?"),
        ("wss://anna:12/secret@plant", "cannot be read"),  # a slash that should be %2F
    ],
)
def test_a_wrong_address_is_explained_without_its_password(url: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Endpoint.parse(url)
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_user_and_password_given_apart_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_NODE_PASSWORD", "from the environment")
    endpoint = Endpoint.parse("mqtt://anna:old@plant", username="berta", password="new")  # noqa: S106
    assert (endpoint.username, endpoint.password) == ("berta", "new")


@pytest.mark.parametrize(
    ("url", "password"),
    [
        ("mqtt://anna@plant", "from the environment"),
        ("mqtt://anna:mine@plant", "mine"),
        ("mqtt://plant", None),
    ],
)
def test_the_password_may_stand_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, url: str, password: str | None
) -> None:
    monkeypatch.setenv("EDGE_NODE_PASSWORD", "from the environment")
    assert Endpoint.parse(url).password == password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mqtt://plant", "mqtt://plant:1883"),
        ("mqtts://anna:secret@[::1]", "mqtts://anna@[::1]:8883"),
        ("wss://anna:secret@plant/x", "wss://anna@plant:443/x"),
    ],
)
def test_an_endpoint_shows_itself_without_its_password(url: str, shown: str) -> None:
    endpoint = Endpoint.parse(url)
    assert str(endpoint) == shown
    assert "secret" not in repr(endpoint)
    assert str(Endpoint.parse(shown)) == shown


def test_a_password_in_the_address_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Endpoint.parse("mqtt://anna@plant").password is None
    assert caplog.messages == []
    assert Endpoint.parse("mqtt://anna:mine@plant").password == "mine"  # noqa: S105
    assert caplog.messages == [
        (
            "the password in the broker's address can be read by others on this machine; set "
            "EDGE_NODE_PASSWORD"
        )
    ]


def test_certificates_need_encryption_and_each_other() -> None:
    with pytest.raises(UsageError, match="mqtts://"):
        Endpoint.parse("mqtt://plant", ca="ca.pem")
    with pytest.raises(UsageError, match="belong together"):
        Endpoint.parse("mqtts://plant", cert="node.crt")
    with pytest.raises(UsageError, match="belong together"):
        Endpoint.parse("mqtts://plant", key="node.key")


def test_an_unusable_certificate_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.pem"):
        Endpoint.parse("mqtts://plant", ca=tmp_path / "missing.pem").tls_context()
    (tmp_path / "noise.pem").write_text("noise")
    with pytest.raises(UsageError, match=r"noise\.pem"):
        Endpoint.parse("mqtts://plant", ca=tmp_path / "noise.pem").tls_context()
