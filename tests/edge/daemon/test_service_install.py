"""A line as a service: the unit that install-service writes, options from the environment,
exit codes.
"""

import errno
import os
import pwd
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_config.protocol.errors import BrokerError, BugError, EdgeNodeError, UsageError
from broker_config.security import secret_environment
from edge.bundle.bundle_format import BundleError
from edge.config.instance import Instance
from edge.daemon import line_settings
from edge.daemon.exit_codes import FINAL, code
from edge.daemon.service_install import find_needs
from edge.daemon.systemd_unit import compose, quote
from edge.inference.pipeline import Source
from edge.sources.source import Access
from edge_node.cli.main import app, command_tree
from tests.support.plants import here
from tests.support.tiny_bundle import tiny_bundle

ME = pwd.getpwuid(os.getuid()).pw_name
COMMANDS = command_tree(app).commands
OPTIONS = ("bundle", "trust", "watch", "ca", "cert", "key", "output", "state")


class UsbCamera:
    """Settings of a source that may be at USB or in the network."""

    def open_source(self, instance: Instance) -> Source:
        raise NotImplementedError

    def access(self) -> Access:
        return Access(devices=("char-usb_device",), interfaces=True)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a service may look, and has its edge-node: not in /tmp,
    where these tests may be themselves.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        found = Path(name)
        found.chmod(0o755)
        tiny_bundle(found / "bundle")
        (found / "edge-node").write_text("#!/bin/sh\n")
        (found / "edge-node").chmod(0o755)
        monkeypatch.setattr(sysconfig, "get_path", lambda _: name)
        for each in ("camera", "out", "log"):
            (found / each).mkdir()
        yield found


def install(folder: Path, content: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """Print the unit of a line with this file."""
    (folder / "line.toml").write_text('bundle = "bundle"\n' + content)
    return here(
        "install-service", "--config", folder / "line.toml", "--user", ME, "--dry-run", *flags
    )


def unit(folder: Path, content: str, *flags: object) -> list[str]:
    result = install(folder, content, *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


# ---------------------------------------------------------------- the unit


def test_the_unit_starts_this_edge_node_with_this_file_and_says_how_it_is_watched_and_restarted(
    folder: Path,
) -> None:
    found = unit(folder, "")
    [start] = [line for line in found if line.startswith("ExecStart=")]
    program, *words = start.removeprefix("ExecStart=").split()
    assert Path(program).is_absolute()
    assert words[-3:] == ["serve", "--config", str(folder / "line.toml")]
    assert {
        "Type=notify",
        "NotifyAccess=main",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "WatchdogSec=30",
        "Restart=on-failure",
        f"RestartPreventExitStatus={' '.join(map(str, FINAL))}",
        f"User={ME}",
        "StateDirectory=edge-node",
        "After=network-online.target",
    } <= set(found)


def test_it_may_write_where_the_settings_say_and_nowhere_else(folder: Path) -> None:
    content = (
        'output = "out/verdicts.jsonl"\n[log]\npath = "log/line.log"\n'
        '[[sources]]\nkind = "folder"\npath = "camera"\n[[sinks]]\nkind = "csv"\npath = '
        '"out/verdicts.csv"\n'
    )
    assert [line for line in unit(folder, content) if line.startswith("ReadWritePaths")] == [
        f"ReadWritePaths={folder}/out",
        f"ReadWritePaths={folder}/log",
    ]
    found = unit(folder, '[[sources]]\nkind = "folder"\npath = "camera"\nafter = "delete"\n')
    assert f"ReadWritePaths={folder}/camera" in found


def test_a_camera_a_low_port_and_a_secret_get_what_they_need(folder: Path) -> None:
    plain = unit(folder, "")
    assert {"PrivateDevices=yes", "CapabilityBoundingSet="} <= set(plain)
    (folder / "password").write_text("secret")
    found = unit(
        folder,
        'port = 80\n[[sources]]\nkind = "video"\ninput = 2\n',
        "--secret",
        f"EDGE_NODE_PASSWORD={folder}/password",
    )
    assert {
        "DeviceAllow=/dev/video2 rw",
        "SupplementaryGroups=video",
        "AmbientCapabilities=CAP_NET_BIND_SERVICE",
        f"LoadCredential=EDGE_NODE_PASSWORD:{folder}/password",
    } <= set(found)
    assert "PrivateDevices=yes" not in found


BROKER = '[[sources]]\nkind = "mqtt"\nurl = "mqtts://plant.local"\ntopic = "t"\nca = "ca.pem"\n'


def test_a_file_that_a_source_names_must_be_readable(folder: Path) -> None:
    refused = install(folder, BROKER)
    assert f"may not read {folder}/ca.pem" in refused.stderr
    (folder / "ca.pem").touch()
    assert "PrivateDevices=yes" in unit(folder, BROKER)


def test_a_source_may_need_devices_of_a_class_and_the_list_of_network_interfaces(
    folder: Path,
) -> None:
    settings = line_settings.Settings(sources=(UsbCamera(),))
    options = {**dict.fromkeys(OPTIONS), "port": 8080}
    needs = find_needs(folder / "line.toml", options, settings, {})
    found = compose("line", ME, ("edge-node",), needs).splitlines()
    assert {"DeviceAllow=char-usb_device rw", "RestrictAddressFamilies=AF_NETLINK"} <= set(found)
    assert "PrivateDevices=yes" not in found
    assert "RestrictAddressFamilies=AF_NETLINK" not in unit(folder, "")


@pytest.mark.slow
@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize(
    "content", ["", 'port = 80\nwatch = "camera"\n[[sources]]\nkind = "video"\ninput = 0\n']
)
def test_systemd_accepts_the_unit_and_finds_little_exposed(folder: Path, content: str) -> None:
    (folder / "edge-node.service").write_text("\n".join(unit(folder, content)) + "\n")
    verify = subprocess.run(
        ["systemd-analyze", "verify", folder / "edge-node.service"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verify.returncode, verify.stderr) == (0, "")
    exposed = subprocess.run(
        [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--no-pager",
            folder / "edge-node.service",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    [level] = re.findall(r"exposure level for \S+: ([0-9.]+)", exposed.stdout)
    assert float(level) <= 2.5


def test_it_is_written_where_it_is_wanted_and_what_to_do_next_is_said(folder: Path) -> None:
    (folder / "line.toml").write_text('bundle = "bundle"\n')
    out = folder / "press.service"
    result = here(
        "install-service",
        "--config",
        folder / "line.toml",
        "--user",
        ME,
        "--name",
        "press",
        "--out",
        out,
    )
    assert result.returncode == 0, result.stderr
    assert "StateDirectory=press" in out.read_text()
    assert "systemctl daemon-reload && systemctl enable --now press" in result.stdout


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('watch = "/home/camera"\n', "/home/camera lies in /home"),
        ('output = "/tmp/verdicts.jsonl"\n', "which the service does not see"),
        ('watch = "none"\n', "may not read"),
        ('output = "none/verdicts.jsonl"\n', "may not write"),
        ("port = true\n", "port = true does not fit"),
        ("[veiw]\n", "did you mean 'view'?"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(folder: Path, content: str, why: str) -> None:
    result = install(folder, content)
    assert result.returncode in (2, 78)
    assert why in result.stderr
    assert "What to do:" in result.stderr


@pytest.mark.slow
@pytest.mark.needs("root")  # who finds out what others may do
def test_what_the_user_may_not_read_or_write_is_named(folder: Path) -> None:
    (folder / "secret").mkdir(mode=0o700)
    for content, why in (
        ('watch = "secret"\n', f"nobody may not read {folder}/secret"),
        ('output = "out/verdicts.jsonl"\n', f"nobody may not write {folder}/out"),
    ):
        result = install(folder, content, "--user", "nobody")
        assert result.returncode == 2
        assert why in result.stderr
    assert "no user whoever" in install(folder, "", "--user", "whoever").stderr


def test_words_are_quoted_as_systemd_reads_them() -> None:
    assert quote("/srv/plain") == "/srv/plain"
    assert quote("/srv/100 %") == '"/srv/100 %%"'
    assert quote('a"b$c d\\') == '"a\\"b$$c d\\\\"'


# ---------------------------------------------------------------- secrets


def test_a_secret_comes_from_the_environment_else_from_a_credential_of_systemds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(secret_environment.PASSWORD, raising=False)
    assert secret_environment.read_secret(secret_environment.PASSWORD) is None
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert secret_environment.read_secret(secret_environment.PASSWORD) is None
    (tmp_path / secret_environment.PASSWORD).write_text("from a file\n")
    assert secret_environment.read_secret(secret_environment.PASSWORD) == "from a file"
    monkeypatch.setenv(secret_environment.PASSWORD, "from the environment")
    assert secret_environment.read_secret(secret_environment.PASSWORD) == "from the environment"


# ---------------------------------------------------------------- exit codes


def caused(error: EdgeNodeError, by: OSError) -> EdgeNodeError:
    error.__cause__ = by
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BundleError("the bundle is damaged", "copy it again"), os.EX_DATAERR),
        (
            caused(BundleError("it lacks a file", "copy it"), FileNotFoundError(errno.ENOENT, "")),
            os.EX_NOINPUT,
        ),
        (BrokerError("no broker", "start it"), os.EX_UNAVAILABLE),
        (BugError("a bug", "tell us"), os.EX_SOFTWARE),
        (ZeroDivisionError(), os.EX_SOFTWARE),
        (OSError(errno.ENOSPC, "full", "/x"), os.EX_IOERR),
        (
            caused(EdgeNodeError("the port is taken", "wait"), OSError(errno.EADDRINUSE, "")),
            os.EX_TEMPFAIL,
        ),
        (
            caused(EdgeNodeError("port 80", "be root"), PermissionError(errno.EACCES, "")),
            os.EX_NOPERM,
        ),
        (UsageError("wrong", "right"), os.EX_CONFIG),
    ],
)
def test_serve_ends_with_the_code_of_sysexits_that_fits(error: Exception, expected: int) -> None:
    try:
        raise error
    except Exception as raised:
        found = code(raised)
    assert found == expected


def test_what_only_a_person_can_cure_is_not_started_again(tmp_path: Path) -> None:
    (tmp_path / "line.toml").write_text("[veiw]\n")
    assert here("serve", "--config", tmp_path / "line.toml").returncode == 78 in FINAL
    assert here("serve", tmp_path).returncode in FINAL
    assert here("serve", "--nothing").returncode == 2 in FINAL
    assert not {os.EX_UNAVAILABLE, os.EX_SOFTWARE, os.EX_IOERR, os.EX_TEMPFAIL} & set(FINAL)
