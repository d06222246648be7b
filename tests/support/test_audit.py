"""`make audit` finds known vulnerabilities and what is not pinned;
without a network it says so, and does not hang.

`make` installs what requirements.lock has the hashes of, and nothing else.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.audit import (
    CONSTRAINTS,
    LOCK,
    audit,
    installed,
    out_of_reach,
    pins,
    unlocked,
    unpinned,
    vulnerable,
)
from tests.support.paths import REPOSITORY

FAULTS = {  # as OSV tells them
    ("jinja2", "2.10"): {
        "id": "GHSA-462w-v97r-4m45",
        "aliases": ["CVE-2019-10906"],
        "summary": "Jinja2 sandbox escape via string formatting",
        "affected": [
            {
                "package": {"name": "jinja2", "ecosystem": "PyPI"},
                "ranges": [
                    {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.10.1"}]}
                ],
            }
        ],
    }
}


class Advisories(BaseHTTPRequestHandler):
    """OSV's API, with what FAULTS holds."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fault = FAULTS.get((query["package"]["name"], query["version"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [fault]} if fault else {}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query"
        server.shutdown()


def test_a_known_vulnerability_of_a_pinned_version_is_found(service: str, tmp_path: Path):
    pinned = tmp_path / "constraints.txt"
    pinned.write_text("Jinja2==2.10\nmsgspec==0.22.0\n")
    assert out_of_reach(service, 10) is None
    assert vulnerable(pinned, service) == [
        "jinja2 2.10: CVE-2019-10906, GHSA-462w-v97r-4m45, fixed in 2.10.1"
    ]


def test_without_a_service_the_audit_says_so_at_once_and_looks_at_what_is_pinned(
    capsys: pytest.CaptureFixture[str],
):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/query"
        assert audit(CONSTRAINTS, url, timeout=0.2) == []
    assert (
        f"SKIPPED: no known vulnerability was looked for, since {url} is out of reach"
        in capsys.readouterr().out
    )
    assert out_of_reach("http://127.0.0.1:1/v1/query", 10) is not None


def test_a_page_that_is_no_advisory_service_is_not_taken_for_one(
    service: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(FAULTS, ("jinja2", "2.10"), None)
    assert out_of_reach(service, 10) == "what answers there knows of no vulnerability"


def test_every_package_that_is_installed_for_edge_node_is_pinned():
    needed = installed("edge-node")
    assert len(needed) > 60
    assert unpinned(CONSTRAINTS, needed) == []
    assert unpinned(CONSTRAINTS, needed | {"numpy": "1.0", "left-pad": "2.0"}) == [
        "left-pad 2.0 is installed, constraints.txt pins no version",
        f"numpy 1.0 is installed, constraints.txt pins {needed['numpy']}",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "numpy",
        "numpy>=2",
        "numpy==2.*",
        "numpy @ https://example.org/numpy.whl",
        "-e .",
        "--index-url http://x",
    ],
)
def test_what_is_not_an_exact_version_from_the_index_is_no_pin(line: str, tmp_path: Path):
    (tmp_path / "constraints.txt").write_text(f"# ours\nmsgspec==0.22.0\n{line}\n")
    with pytest.raises(ValueError, match="NAME==VERSION"):
        pins(tmp_path / "constraints.txt")


def test_edge_node_asks_for_no_package_by_a_url():
    project = tomllib.loads((CONSTRAINTS.parent / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    assert [each for each in wanted if "@" in each] == []


def test_of_every_pinned_version_the_hashes_are_known_but_of_torchs(tmp_path: Path):
    assert unlocked(CONSTRAINTS, LOCK) == []
    newer = tmp_path / "constraints.txt"
    newer.write_text("msgspec==99.0\ntorch==99.0\nleft-pad==2.0\n")
    assert unlocked(newer, LOCK) == [
        "left-pad 2.0 is pinned, requirements.lock has hashes of no version: make lock",
        (
            "msgspec 99.0 is pinned, requirements.lock has hashes of "
            f"{pins(CONSTRAINTS)['msgspec']}: make lock"
        ),
    ]


def test_make_installs_without_hashes_nothing_but_torch_and_this_checkout(tmp_path: Path):
    steps = make("--dry-run", f"VENV={tmp_path}", f"{tmp_path}/.installed").stdout.splitlines()
    installs = "\n".join(steps).replace("requirements.lock || ", "requirements.lock\n").splitlines()
    installs = [step for step in installs if "pip install" in step]
    locked = [
        step for step in installs if "--require-hashes" in step and "--only-binary :all:" in step
    ]
    assert [Path(step.split()[-1]).name for step in locked] == [
        "uv.lock",
        "requirements.lock",
        "requirements.lock",
    ]
    others = [step for step in installs if step not in locked]
    own = "--no-deps --editable . --editable ./weights"
    assert ["torch torchvision" in step or own in step for step in others] == [True, True]


@pytest.fixture
def tampered(tmp_path: Path) -> Path:
    """A wheel with the name of one of ours, and other bytes."""
    wheel = tmp_path / "wheels" / f"six-{pins(CONSTRAINTS)['six']}-py2.py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"PK")
    return wheel


def test_a_tampered_wheel_is_not_installed(tampered: Path, tmp_path: Path):
    (tmp_path / "six.lock").write_text(
        "".join(re.findall(r"^six==.*\n(?:    .*\n)+", LOCK.read_text(), re.MULTILINE))
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--isolated",
        "--no-index",
        "--find-links",
        tampered.parent,
    ]
    pip += [
        "--require-hashes",
        "--no-deps",
        "--target",
        tmp_path / "installed",
        "--requirement",
        tmp_path / "six.lock",
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "installed").exists()


def test_a_tampered_wheel_does_not_get_into_a_wheelhouse(tampered: Path):
    done = make("verified", f"WHEELHOUSE={tampered.parent}")
    assert done.returncode != 0
    assert f"{tampered.name} is no file of requirements.lock" in done.stdout
    # what was just built has no hash yet
    for name in ("edge_node", "edge_node_weights"):
        tampered = tampered.rename(tampered.with_name(f"{name}-0.1.0-py3-none-any.whl"))
        assert make("verified", f"WHEELHOUSE={tampered.parent}").returncode == 0


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
