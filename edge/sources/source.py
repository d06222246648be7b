"""Interface of every kind of source: settings that open it, and say what access it needs."""

from pathlib import Path
from typing import NamedTuple, Protocol

from edge.config.instance import Instance
from edge.inference.pipeline import Source


class Access(NamedTuple):
    """Access to this machine that a source needs, for the service that runs it."""

    reads: tuple[Path, ...] = ()  # files and folders
    writes: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ()  # files below /dev, or groups of them as systemd names them
    interfaces: bool = False  # the list of network interfaces


class SourceSettings(Protocol):
    """Settings of a kind of source, a msgspec struct tagged by its `kind`;
    what a package registers among `edge_node.sources`.

    The name of the entry point is the kind: `snapshot = "package.snapshot:Settings"`.
    """

    def open_source(self, instance: Instance) -> Source:
        """Open the source; EdgeNodeError when it cannot be."""

    def access(self) -> Access:
        """Return what the source needs of this machine, beside the files that its settings name
        under `producer`, `ca`, `cert`, `key` and `server_cert`.
        """
