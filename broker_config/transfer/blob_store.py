"""Store of blobs: files named by their SHA-256."""

import hashlib
import re
import secrets
import zlib
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

from broker_config.storage.disk import move_durably, writing

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BlobStore:
    """A folder of blobs. A file named by a digest is complete; partial ones are in `incoming`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.incoming = folder / "incoming"
        with self.writing():
            self.incoming.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> tuple[str, int]:
        """Store `data` durably; return its digest and size in bytes.

        EdgeNodeError if the disk does not take it.

        A file of that name whose bytes have changed is replaced.
        """
        digest = hashlib.sha256(data).hexdigest()
        if not self.is_intact(digest):
            partial = self.incoming / f"put-{secrets.token_hex(8)}"
            with self.writing():
                try:
                    partial.write_bytes(data)
                    self.adopt(partial, digest)
                finally:
                    partial.unlink(missing_ok=True)
        return digest, len(data)

    def adopt(self, partial: Path, digest: str) -> Path:
        """Make a complete file of `incoming` durable, and the blob `digest`; return its path."""
        with self.writing():
            move_durably(partial, self.path(digest))
        return self.path(digest)

    def path(self, digest: str) -> Path:
        """Return the path of a blob, which need not exist."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a SHA-256 digest")
        return self.folder / digest

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).exists()

    def digests(self) -> set[str]:
        """Return the digests of all complete blobs."""
        return {path.name for path in self.folder.iterdir() if _DIGEST.fullmatch(path.name)}

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """Return up to `length` bytes of a blob from `offset`."""
        with self.path(digest).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(length)

    def remove(self, digest: str) -> None:
        """Delete a blob; it need not exist."""
        self.path(digest).unlink(missing_ok=True)

    def remove_damaged(self, digest: str) -> None:
        """Delete a blob whose bytes do not match its digest;
        one that is about to be complete stays.
        """
        if digest in self and not self.is_intact(digest):
            self.remove(digest)

    def is_intact(self, digest: str) -> bool:
        """Whether a blob exists and its bytes match its digest."""
        if digest not in self:
            return False
        with self.path(digest).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest

    def checksums(self, digest: str, chunk_size: int) -> list[int] | None:
        """CRC-32 of each chunk of a blob; None if it is missing or its bytes do not match its
        digest.
        """
        found = hashlib.sha256()
        sums = []
        try:
            with self.path(digest).open("rb") as file:
                while chunk := file.read(chunk_size):
                    found.update(chunk)
                    sums.append(zlib.crc32(chunk))
        except OSError:
            return None
        return sums if found.hexdigest() == digest else None

    def purge(self, keep: Collection[str], *, arriving: bool = False) -> None:
        """Delete all blobs but those of `keep`, and partial files too unless blobs are still
        `arriving`.
        """
        with self.writing():
            incoming = [] if arriving else self.incoming.iterdir()
            for path in [*self.folder.iterdir(), *incoming]:
                if path != self.incoming and path.name.split("-")[0] not in keep:
                    path.unlink(missing_ok=True)

    def writing(self) -> AbstractContextManager[None]:
        """Turn errors of the disk into an EdgeNodeError that names the folder."""
        return writing(self.folder)
