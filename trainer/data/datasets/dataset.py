"""A public data set's facts: where it is, whose it is,
and which images of which classes it holds.
"""

import re
from collections.abc import Mapping
from pathlib import PurePath

import msgspec


class Images(msgspec.Struct, frozen=True):
    """The distinct images of a class, by the bytes of their files."""

    number: int
    checksum: str  # SHA-256 of their sorted SHA-256 digests in hexadecimal, one a line


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """A public data set. Fields stay empty where the facts could not be verified."""

    name: str
    title: str
    licence: str
    citation: str
    home: str  # URL of its authors' page
    by_hand: str  # URL of a page for downloading it in a browser
    archive: str  # URL of a ZIP file that needs no login
    md5: str  # of that file, as its publisher states it
    classes: Mapping[str, Images | None]
    # other names of its classes, in folders or before the number in files' names
    aliases: Mapping[str, str]

    @property
    def verifiable(self) -> bool:
        """Whether its images' checksums are known."""
        return None not in self.classes.values()

    def class_of(self, path: PurePath) -> str | None:
        """The class of an image: of the nearest folder that is named like one,
        else of the name before the number.
        """
        known = {_normalise(name): name for name in self.classes} | dict(self.aliases)
        for word in (*reversed(path.parts[:-1]), path.stem.rpartition("_")[0]):
            if _normalise(word) in known:
                return known[_normalise(word)]
        return None


def _normalise(word: str) -> str:
    return re.sub(r"[ _-]+", "_", word.strip().lower())
