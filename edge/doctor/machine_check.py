"""Checks of this machine: its clock, its disk, its Python."""

import importlib.metadata
import importlib.util
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from broker_config.protocol import topics
from edge.doctor.probe import CheckContext, Outcome, Result

PACKAGES = ("broker_config", "edge", "edge_node", "export", "trainer")
ROOT = Path(__file__).parent.parent.parent
ROOM_LEFT = 1 << 30  # bytes that should be free if no model is known
# of the model in a node's folder at most: its own, the received one, optimiser state, exports
COPIES = 20
SYNCS = 10
SLOW_SYNC = 0.1  # seconds


def clock(context: CheckContext) -> Result:  # noqa: ARG001  (the signature of a check)
    """Whether this machine's clock is plausible and synchronised."""
    now = time.time()
    installed = Path(__file__).stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < installed:
        return Result(
            "warning",
            f"it shows {shown}, which is before edge-node was installed",
            "set it: timedatectl set-ntp true",
        )
    match _clock_synchronised():
        case "yes":
            return Result("ok", f"{shown}, kept right by a time service")
        case "no":
            return Result(
                "warning",
                f"{shown}, which no time service keeps right",
                "switch one on: timedatectl set-ntp true",
            )
    return Result(
        "unknown", f"{shown}; whether that is right cannot be known here, and MQTT carries no time"
    )


def _clock_synchronised() -> str:
    """The answer of systemd: `yes`, `no`, or an empty string where there is no systemd."""
    command = ["timedatectl", "show", "--property=NTPSynchronized", "--value"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def disk(context: CheckContext) -> Result:
    """Whether the state folder is writable, fast,
    and has room for the federations on this broker.
    """
    folder = next(
        each
        for each in (context.state.absolute(), *context.state.absolute().parents)
        if each.is_dir()
    )
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="edge-node-doctor-") as scratch:
            times = [_time_sync(Path(scratch)) for _ in range(SYNCS)]
            has_wal = _supports_wal(Path(scratch))
    except OSError as error:
        return Result(
            "failure",
            f"{folder} cannot be written: {error.strerror}",
            "make it writable for this user, or name another with --state",
        )
    free = shutil.disk_usage(folder).free
    sync = statistics.median(times)
    figures: dict[str, float] = {"free_bytes": free, "sync_milliseconds": round(sync * 1e3, 2)}
    text = f"{folder}: {free / 1e9:.1f} GB free, a write is safe after {sync * 1e3:.1f} ms"
    if not has_wal:
        return Result(
            "failure", f"{text}; SQLite cannot keep its journal there", "take a local disk", figures
        )
    needed = _needed_bytes(context)
    if needed:
        figures["needed_bytes"] = needed
    if free < (needed or ROOM_LEFT):
        text += (
            f"; the federation here needs {needed / 1e9:.2f} GB"
            if needed
            else "; a federation may need more"
        )
        outcome: Outcome = "failure" if needed else "warning"
        return Result(outcome, text, "free some space, or move --state", figures)
    if sync > SLOW_SYNC:
        return Result("warning", text, "expect slow rounds: prefer an SSD to an SD card", figures)
    return Result("ok", text, figures=figures)


def _time_sync(folder: Path) -> float:
    """Seconds until a small write is on the disk."""
    started = time.perf_counter()
    with (folder / "write").open("wb") as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def _supports_wal(folder: Path) -> bool:
    """Whether SQLite's WAL mode works there: network file systems often lack what it needs."""
    connection = sqlite3.connect(folder / "journal")
    try:
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("CREATE TABLE trial (number)")
    except sqlite3.OperationalError:
        return False
    finally:
        connection.close()
    return bool(mode == "wal")


def _needed_bytes(context: CheckContext) -> int:
    """Bytes that a federation on this broker needs at most; 0 if none is known."""
    if not context.specs:
        return 0
    nodes = max(spec.nodes for spec in context.specs)
    # contributions, this broadcast and the next
    copies = nodes + 2 if context.name == topics.COORDINATOR else COPIES
    return copies * context.model_bytes


def python(context: CheckContext) -> Result:  # noqa: ARG001
    """Whether Python finds our packages under their names, and which kind of install this is."""
    foreign = {room: where for room in PACKAGES if (where := _location_of(room)) != ROOT / room}
    version = ".".join(map(str, sys.version_info[:3]))
    text = (
        f"Python {version}, edge-node {importlib.metadata.version('edge-node')}, {_torch_version()}"
    )
    if foreign:
        which = "; ".join(f"{room} is {where or 'missing'}" for room, where in foreign.items())
        return Result(
            "failure",
            f"{text}; {which}, not edge-node's",
            "another package has the same import name: give edge-node an environment of its own "
            "(python3 -m venv)",
        )
    owners = importlib.metadata.packages_distributions()
    others = set()
    for room in PACKAGES:
        for each in owners.get(room, []):
            if each != "edge-node":
                others.add(f"{each} ({room})")
    if others:
        return Result(
            "warning",
            f"{text}; these packages have import names of edge-node's too: "
            f"{', '.join(sorted(others))}",
            "uninstall them, then install edge-node again: their files may have replaced some "
            "of ours",
        )
    return Result("ok", text)


def _torch_version() -> str:
    """The version of torch: without it, only a line or a coordinator runs here."""
    try:
        return f"torch {importlib.metadata.version('torch')}"
    except importlib.metadata.PackageNotFoundError:
        return "no torch: a line or a coordinator, but no node"


def _location_of(room: str) -> Path | None:
    found = importlib.util.find_spec(room)
    return Path(found.origin).parent if found and found.origin else None
