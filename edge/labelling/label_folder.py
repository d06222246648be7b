"""The plant's image folder, as labelled images get into it:
each in three steps that a kill cannot tear apart.

A copy is prepared under a hidden name in the class folder; the history says who labelled it; the
copy gets its name.
"""

import re
from pathlib import Path

from broker_config.protocol.names import check_class_name, is_class_name
from broker_config.storage import disk
from edge.labelling.label_history import Labelling, Undo
from edge.uncertainty.image_retention import STEM


class LabelFolder:
    """FOLDER/CLASS/FILE, as `edge-node join` reads it. Raises OSError when the disk fails."""

    def __init__(self, folder: Path, line: str) -> None:
        """`line` tells its hidden files from those of other lines."""
        self._folder = folder
        self._line = line
        # The whole name: "line-1" is also how the name of a line "north.line-1" ends.
        self._is_hidden = re.compile(rf"\.{STEM.pattern}\.[a-z]+\.{re.escape(line)}").fullmatch
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def classes(self) -> list[str]:
        """The names of the class folders that are there, in alphabetic order;
        `join` tells of those that no class can have.
        """
        return sorted(
            path.name
            for path in self._folder.iterdir()
            if path.is_dir() and is_class_name(path.name)
        )

    @property
    def stems(self) -> set[str]:
        """What the names of labelled images in class folders begin with."""
        names = (path.name.partition(".")[0] for path in self._folder.glob("*/*"))
        return {name for name in names if STEM.fullmatch(name)}

    def prepare(self, label: str, file: str, content: bytes) -> None:
        """Write an image under its hidden name."""
        hidden = self._hidden(label, file)
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_bytes(content)
        disk.sync(hidden)

    def settle(self, label: str) -> None:
        """Wait until the names of what was prepared are on the disk."""
        disk.sync(self._folder / label)
        disk.sync(self._folder)

    def finish(self, newest: Labelling | Undo | None) -> None:
        """Carry out the history's newest entry, as far as that was not done before,
        and discard what else is hidden.
        """
        entry = newest.labelling if isinstance(newest, Undo) else newest
        if entry and entry.label:
            for image in entry.images:
                file = self._folder / entry.label / image.file
                hidden = self._hidden(entry.label, image.file)
                if isinstance(newest, Undo):
                    file.unlink(missing_ok=True)
                elif hidden.exists():
                    hidden.replace(file)
            if (self._folder / entry.label).exists():
                disk.sync(self._folder / entry.label)
        for path in self._folder.glob("*/.*"):
            if self._is_hidden(path.name):
                path.unlink()

    def _hidden(self, label: str, file: str) -> Path:
        check_class_name(label)  # it is a folder's name: none may lead out of ours
        return self._folder / label / f".{file}.{self._line}"
