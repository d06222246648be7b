"""Manifests and chunks of blobs."""

import hashlib

from broker_config.protocol.messages import Manifest

KIB = 1024


def manifest_of(data: bytes, chunk_size: int = KIB, **fields: object) -> Manifest:
    facts = {
        "federation": "f",
        "run": "0" * 16,
        "round": 4,
        "node": "holder",
        "digest": digest_of(data),
    }
    return Manifest(**facts | {"size": len(data), "chunk_size": chunk_size} | fields)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def chunk_of(data: bytes, index: int, chunk_size: int = KIB) -> bytes:
    return data[index * chunk_size : (index + 1) * chunk_size]
