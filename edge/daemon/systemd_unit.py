"""A line as a systemd service: the unit file, with no more rights than its settings need."""

import string
from pathlib import Path
from typing import NamedTuple

from edge.daemon.exit_codes import FINAL

# A sandbox: whatever is not named here is read-only or invisible. ProcSubset=pid is missing on
# purpose: onnxruntime reads /proc/cpuinfo on ARM.
_UNIT = string.Template("""\
# Written by edge-node install-service; run that again after changing paths, the port or cameras in
# $config. For other changes there: systemctl reload $name
[Unit]
Description=edge-node, inspecting images ($name)
Wants=network-online.target
After=network-online.target
# The unit gives up after 200 starts within an hour: systemctl reset-failed $name
StartLimitIntervalSec=1h
StartLimitBurst=200

[Service]
Type=notify
NotifyAccess=main
ExecStart=$command
ExecReload=/bin/kill -HUP $$MAINPID
WatchdogSec=30
TimeoutStopSec=60
Restart=on-failure
RestartSec=10
# A restart cures none of these (sysexits.h): usage, data, missing files, permissions, configuration
RestartPreventExitStatus=$final

User=$user
UMask=0027
StateDirectory=$name
StateDirectoryMode=0750
$granted
MemoryMax=75%
OOMPolicy=stop
LimitCORE=0

ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
NoNewPrivileges=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
""")


class Needs(NamedTuple):
    """Files, devices and ports that a line's service must have access to,
    according to its settings.
    """

    config: Path
    reads: tuple[Path, ...]  # files and folders, the bundle among them
    writes: tuple[Path, ...]  # folders
    cameras: tuple[str, ...]  # device files, or classes of them
    interfaces: bool  # the list of network interfaces, in which cameras are looked for
    port: int
    # name of the environment variable, and the file that holds its value
    secrets: tuple[tuple[str, Path], ...]


def compose(name: str, user: str, program: tuple[str, ...], needs: Needs) -> str:
    """The unit file of a line that runs as `user`."""
    command = " ".join(quote(each) for each in (*program, "serve", "--config", str(needs.config)))
    return _UNIT.substitute(
        config=needs.config,
        name=name,
        user=user,
        command=command,
        final=" ".join(map(str, FINAL)),
        granted="\n".join(_access_directives(name, needs)),
    )


def _access_directives(name: str, needs: Needs) -> list[str]:
    """The unit's directives that depend on the settings."""
    lines = [f"LoadCredential={variable}:{file}" for variable, file in needs.secrets]
    if needs.config.parent == Path("/etc") / name:
        lines.append(f"ConfigurationDirectory={name}")
    for folder in needs.writes:
        if folder.is_relative_to(Path("/var/lib") / name):
            continue
        if folder == Path("/var/log") / name:
            lines.append(f"LogsDirectory={name}")
        else:
            lines.append(f"ReadWritePaths={quote(str(folder))}")
    if needs.cameras:
        lines += ["DevicePolicy=closed", *(f"DeviceAllow={each} rw" for each in needs.cameras)]
        lines.append("SupplementaryGroups=video")
    else:
        lines.append("PrivateDevices=yes")
    if needs.interfaces:
        lines.append("RestrictAddressFamilies=AF_NETLINK")
    if 0 < needs.port < 1024:
        lines += [
            f"{each}=CAP_NET_BIND_SERVICE"
            for each in ("CapabilityBoundingSet", "AmbientCapabilities")
        ]
    else:
        lines += ["CapabilityBoundingSet=", "PrivateUsers=yes"]
    return lines


def quote(text: str) -> str:
    """Quote and escape a word for systemd."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(escaped) & set(" '\";") else escaped
