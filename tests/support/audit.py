"""Audit of what edge-node is built on: `make audit`.

Without a network: constraints.txt pins every package of others that an install brings, to a version
of the package index and not to a URL, requirements.lock has the hashes of these versions, and what
is installed fits together. With one: pip-audit asks OSV (osv.dev) for the known vulnerabilities of
these versions. `python -m tests.support.audit [URL]` asks another service with OSV's API, such as
your mirror.
"""

import json
import re
import subprocess
import sys
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import REPOSITORY

CONSTRAINTS = REPOSITORY / "constraints.txt"
LOCK = REPOSITORY / "requirements.lock"
# builds for CPUs, of CUDA and of mirrors have one version and different hashes
UNLOCKED = {"torch", "torchvision"}
# it is built with edge-node, which asks for its own version of it
OURS = {"edge-node-weights"}
OSV = "https://api.osv.dev/v1/query"
EXTRAS = ("", "genicam", "opcua", "tracking", "train", "research", "docs", "dev")
# CVE-2019-10906: the service must know
KNOWN = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.10"}


def pins(constraints: Path) -> dict[str, str]:
    """Versions by name; ValueError for a line that is anything but NAME==VERSION: a URL,
    a range, an option.
    """
    lines = [
        line for line in constraints.read_text().splitlines() if line and not line.startswith("#")
    ]
    if others := [line for line in lines if not re.fullmatch(r"[\w.-]+==\d[\w.]*", line)]:
        raise ValueError(f"{constraints}: {others[0]!r} is not NAME==VERSION")
    return {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }


def installed(name: str) -> dict[str, str]:
    """The versions here of all that a package needs, with all extras of ours."""
    found: dict[str, str] = {}
    todo = [(name, extra) for extra in EXTRAS]
    done = set()
    while todo:
        package, extra = each = todo.pop()
        if each in done:
            continue
        done.add(each)
        there = distribution(package)
        found[canonicalize_name(package)] = there.version.partition("+")[0]  # torch's is 2.13.0+cpu
        for needed in map(Requirement, there.requires or ()):
            if not needed.marker or needed.marker.evaluate({"extra": extra}):
                todo += [(needed.name, more) for more in ("", *needed.extras)]
    del found[canonicalize_name(name)]
    return found


def unpinned(constraints: Path, packages: dict[str, str]) -> list[str]:
    """Packages of which constraints.txt names another version than `packages`, or none."""
    pinned = pins(constraints)
    return [
        f"{name} {version} is installed, {constraints.name} pins {pinned.get(name, 'no version')}"
        for name, version in sorted(packages.items())
        if name not in OURS and pinned.get(name) != version
    ]


def unlocked(constraints: Path, lock: Path) -> list[str]:
    """Versions of constraints.txt whose hashes requirements.lock has not."""
    hashed = re.findall(
        r"^([\w.-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock.read_text(), re.MULTILINE
    )
    versions = {canonicalize_name(name): version for name, version in hashed}
    return [
        (
            f"{name} {version} is pinned, {lock.name} has hashes of "
            f"{versions.get(name, 'no version')}: make lock"
        )
        for name, version in sorted(pins(constraints).items())
        if name not in UNLOCKED and versions.get(name) != version
    ]


def out_of_reach(url: str, timeout: float) -> str | None:
    """Why no advisory service answers at `url`; None if one does,
    and knows of a vulnerability that everybody knows.
    """
    request = urllib.request.Request(  # noqa: S310
        url, json.dumps(KNOWN).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            return (
                None
                if json.load(answer).get("vulns")
                else "what answers there knows of no vulnerability"
            )
    except (OSError, ValueError, AttributeError) as error:
        return str(error)


def vulnerable(constraints: Path, url: str) -> list[str]:
    """The known vulnerabilities of pinned versions;
    CalledProcessError if pip-audit does not come to a result.
    """
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--requirement",
        str(constraints),
        "--no-deps",
        "--disable-pip",
    ]
    command += [
        "--vulnerability-service",
        "osv",
        "--osv-url",
        url,
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    try:
        audited = json.loads(done.stdout)["dependencies"]
    except ValueError:
        raise subprocess.CalledProcessError(
            done.returncode, command, done.stdout, done.stderr
        ) from None
    return [
        f"{each['name']} {each['version']}: {', '.join([fault['id'], *fault['aliases']])}, "
        f"fixed in {', '.join(fault['fix_versions']) or 'no version'}"
        for each in audited
        for fault in each["vulns"]
    ]


def audit(constraints: Path, url: str, timeout: float = 10) -> list[str]:
    """What is wrong with the dependencies; prints what is done, and what cannot be."""
    wrong = unpinned(constraints, installed("edge-node")) + unlocked(constraints, LOCK)
    if why := out_of_reach(url, timeout):
        print(
            f"SKIPPED: no known vulnerability was looked for, since {url} is out of reach ({why})"
        )
        return wrong
    print(f"{len(pins(constraints))} versions looked up at {url}")
    return wrong + vulnerable(constraints, url)


if __name__ == "__main__":
    subprocess.run([sys.executable, "-m", "pip", "check"], check=True)
    found = audit(CONSTRAINTS, *sys.argv[1:] or [OSV])
    print(*found or ["nothing found"], sep="\n")
    sys.exit(bool(found))
