"""Installation of a line's service: the access that its settings require,
and whether its user has it.
"""

import os
import pwd
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from broker_config.protocol.errors import EdgeNodeError, UsageError
from edge.daemon.line_settings import Settings
from edge.daemon.systemd_unit import Needs

# Invisible to the service
_HIDDEN = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108


def find_needs(
    config: Path, given: Mapping[str, Any], settings: Settings, secrets: Mapping[str, str]
) -> Needs:
    """The access that `serve` requires with these options (by name) and tables."""
    reads = [
        Path(given[name])
        for name in ("bundle", "trust", "watch", "ca", "cert", "key")
        if given[name]
    ]
    writes = [Path(given["output"])] if given["output"] else []
    access = [each.access() for each in settings.sources]
    devices: list[str] = []
    for each in access:
        reads += each.reads
        writes += each.writes
        devices += each.devices
    for table in (
        getattr(settings, name) for name in settings.__struct_fields__ if name != "sources"
    ):
        writes += _find_paths(table, ("path",))
    reads += _find_paths(settings, ("producer", "ca", "cert", "key", "server_cert"))
    state = [Path(given["state"])] if given["state"] else []
    parents = []
    for path in writes:
        parent = path if path.is_dir() else path.parent
        parents.append(parent)
    return Needs(
        config=config,
        reads=tuple(reads),
        writes=tuple(dict.fromkeys([*state, *parents])),
        cameras=tuple(devices),
        interfaces=any(each.interfaces for each in access),
        port=given["port"],
        secrets=tuple((name, Path(file).resolve()) for name, file in secrets.items()),
    )


def _find_paths(part: object, fields: tuple[str, ...]) -> Iterator[Path]:
    """The paths in a table, and in the tables within it."""
    if isinstance(part, dict):
        part = tuple(part.values())
    if isinstance(part, tuple):
        for each in part:
            yield from _find_paths(each, fields)
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if name in fields and isinstance(value, str) and value:
                yield Path(value)
            else:
                yield from _find_paths(value, fields)


def find_program() -> tuple[str, ...]:
    """Absolute path of the running edge-node."""
    script = Path(sysconfig.get_path("scripts")) / "edge-node"
    return (str(script),) if script.exists() else (sys.executable, "-P", "-m", "edge_node")


def check_access(user: str, needs: Needs) -> None:
    """Raise EdgeNodeError unless a service of this user has the access that it needs."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise UsageError(
            f"there is no user {user} on this machine",
            f"make one: useradd --system --shell /usr/sbin/nologin {user}, or name another with "
            "--user",
        ) from None
    command = Path(find_program()[0])
    for path in (command, needs.config, *needs.reads, *needs.writes):
        for hidden in _HIDDEN:
            if path.is_relative_to(hidden):
                raise UsageError(
                    f"{path} lies in {hidden}, which the service does not see",
                    "put it below /etc, /opt, /srv or /var/lib, and write that into the settings",
                )
    for path in (command, needs.config, *needs.reads):
        _check_permission(account, "read", path)
    for path in needs.writes:
        _check_permission(account, "write", path)
    for _, file in needs.secrets:
        if not file.is_file():
            raise UsageError(
                f"there is no file {file} with a secret", "write it, readable for root alone"
            )


def _check_permission(
    account: pwd.struct_passwd, what: Literal["read", "write"], path: Path
) -> None:
    flag = "-r" if what == "read" else "-w"
    entering = ["-x"] if path.is_dir() else []
    tests = [flag, *entering]
    if not all(_has_permission(account, each, path) for each in tests):
        remedy = (
            f"make it, and give it to that user: chown -R {account.pw_name}: {path}"
            if what == "write"
            else "make it, and let that user read it, and enter the folders above it"
        )
        raise UsageError(f"{account.pw_name} may not {what} {path}, or it is not there", remedy)


def _has_permission(account: pwd.struct_passwd, test: str, path: Path) -> bool:
    """Whether test(1) succeeds on a path as this user: so the kernel decides,
    access control lists included.
    """
    command = ["/usr/bin/test", test, str(path)]
    if os.geteuid() == account.pw_uid:
        return subprocess.run(command, check=False).returncode == 0
    groups = os.getgrouplist(account.pw_name, account.pw_gid)
    try:
        done = subprocess.run(
            command, user=account.pw_uid, group=account.pw_gid, extra_groups=groups, check=False
        )
    except PermissionError as error:
        raise EdgeNodeError(
            f"only root can find out what {account.pw_name} may do here", "run it with sudo"
        ) from error
    return done.returncode == 0
