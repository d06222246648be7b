"""A node written from docs/protocol.md that masks what it contributes:
no line of this project's masks.
"""

import hashlib
import hmac
import json
import math
import secrets
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from paho.mqtt.enums import MQTTProtocolVersion
from safetensors.numpy import save

from tests.support.foreign_node import ForeignNode, Tensors

P = 2**256 + 297
CAP = 4096  # of FedAvg's weights
DEAD = -1  # in place of a round: nothing more is done


class MaskingForeignNode(ForeignNode):
    """Takes part in a federation of FedAvg whose contributions are masked;
    `members` are the keys of its charter.

    Its process dies when it is told what `dies_at` names, a field of MaskingStep.
    """

    def __init__(
        self,
        port: int,
        name: str,
        *,
        weight: float,
        shift: float,
        key: Ed25519PrivateKey,
        coordinator: Ed25519PublicKey,
        members: Mapping[str, Ed25519PublicKey],
        dies_at: str = "",
    ):
        super().__init__(
            port,
            name,
            MQTTProtocolVersion.MQTTv5,
            weight=weight,
            shift=shift,
            key=key,
            coordinator=coordinator,
        )
        self.members, self.signing, self.dies_at = members, key, dies_at
        self.welcomed, self.masked_round = False, 0  # the round that the rest is of
        self.words: Tensors = {}
        self.agreement = self.cipher = self.own = b""
        self.cohort: dict[str, dict[str, Any]] = {}
        self.neighbours: list[str] = []
        self.counted: list[str] = []
        self.shares: dict[str, str] = {}
        self.parts: list[dict[str, Any]] = []
        self.most_parts = 0  # that a step has come in
        self.survivors: list[str] = []

    # What it says

    def seal(self, topic: str, message: dict[str, Any]) -> bytes:
        if message["type"] == "Hello":
            message = message | {"masks": True, "revision": 2}
        if message["type"] != "MaskingAnswer":
            return super().seal(topic, message)
        text = zstandard.compress(json.dumps(message).encode())
        text = self.encrypt(topic, text) if self.encrypted else text
        return (
            b"\x01" + self.signing.sign(b"\0".join((b"edge-node/v1", topic.encode(), text))) + text
        )

    def answer(self, **what: Any) -> None:
        self.tell("up", type="MaskingAnswer", run=self.spec["run"], round=self.masked_round, **what)

    def sign(self, context: str, *lines: str) -> str:
        statement = "\n".join((*self.scope, *lines)).encode()
        return self.signing.sign(b"\0".join((b"edge-node/v1", context.encode(), statement))).hex()

    def check(self, name: str, signature: str, context: str, *lines: str) -> None:
        statement = "\n".join((*self.scope, *lines)).encode()
        signed = b"\0".join((b"edge-node/v1", context.encode(), statement))
        self.members[name].verify(bytes.fromhex(signature), signed)

    @property
    def scope(self) -> tuple[str, str, str, str]:
        return "default", self.spec["run"], str(self.masked_round), digest(self.spec)

    # What it is told

    def follow(self, message: dict[str, Any]) -> None:
        super().follow(message)
        self.welcomed |= message.get("type") == "Welcome"
        is_open = self.welcomed and self.state.get("status") == "open"
        if is_open and (
            self.state["round"] > self.masked_round or message.get("type") == "Welcome"
        ):
            self.tell_keys()
        if message.get("type") == "MaskingStep" and message["round"] == self.masked_round:
            self.take_part(message)

    def tell_keys(self) -> None:
        if self.state["round"] > self.masked_round:
            self.masked_round, self.cohort, self.survivors = self.state["round"], {}, []
            self.counted, self.shares, self.parts = [], {}, []
            self.agreement, self.cipher, self.own = (secrets.token_bytes(32) for _ in range(3))
        self.answer(keys=self.public())

    def public(self) -> dict[str, Any]:
        keys = {
            "agreement": public(self.agreement),
            "cipher": public(self.cipher),
            "commitment": self.derive_commitment().hex(),
        }
        return keys | {
            "classes": [],
            "signature": self.sign("mask keys", self.name, *keys.values(), ""),
        }

    def derive_commitment(self) -> bytes:
        return expand(self.own, "commitment")

    def take_part(self, step: dict[str, Any]) -> None:
        self.parts = [*self.parts[: step["part"]], step]
        assert len(self.parts) == step["part"] + 1
        if len(self.parts) < step["parts"]:
            return
        whole, self.most_parts = dict(step), max(self.most_parts, step["parts"])
        for name in ("members", "shares", "signatures"):
            whole[name] = {key: value for part in self.parts for key, value in part[name].items()}
        for name in ("counted", "survivors"):
            whole[name] = [each for part in self.parts for each in part[name]]
        self.take_step(whole)

    def take_step(self, step: dict[str, Any]) -> None:
        if self.dies_at and step[self.dies_at]:
            self.state = {"round": DEAD}
            return
        threshold = self.spec["mask_threshold"]
        if step["members"]:
            self.cohort = step["members"]
            assert self.cohort[self.name] == self.public()
            assert threshold <= len(self.cohort) <= self.spec["nodes"]
            assert "coordinator" not in self.cohort
            for name, keys in self.cohort.items():
                self.check(name, keys["signature"], "mask keys", name, *told(keys))
            others = [name for name in self.cohort if name != self.name]
            is_all = not 0 < self.spec["mask_neighbours"] < len(others)
            self.neighbours = (
                others
                if is_all
                else secrets.SystemRandom().sample(others, self.spec["mask_neighbours"])
            )
            self.deal(threshold if is_all else len(self.neighbours) // 2)
            self.answer(shares={name: self.encrypt_share(name) for name in self.neighbours})
        if step["counted"]:
            self.counted, self.shares = step["counted"], step["shares"]
            assert len(self.counted) >= threshold
            assert self.name in self.counted
            self.offer()
        if step["survivors"]:
            self.survivors = step["survivors"]
            assert self.name in self.survivors
            self.answer(signature=self.sign("survivors", *self.list_of_survivors()))
        if step["signatures"]:
            for name, signature in step["signatures"].items():
                self.check(name, signature, "survivors", *self.list_of_survivors())
            assert len({*step["signatures"]} & {*self.survivors}) >= threshold
            self.answer(revealed=self.reveal())

    def list_of_survivors(self) -> tuple[str, str, str]:
        return self.cohort_digest(), ",".join(self.counted), ",".join(self.survivors)

    def cohort_digest(self) -> str:
        lines = [" ".join((name, *told(keys))) for name, keys in sorted(self.cohort.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    # Shares

    def deal(self, threshold: int) -> None:
        """Shares of both secrets for each member, 66 bytes."""
        self.dealt = dict.fromkeys(sorted(self.cohort), b"")
        for secret in (self.agreement, self.own):
            coefficients = [
                int.from_bytes(secret, "big"),
                *(secrets.randbelow(P) for _ in range(threshold - 1)),
            ]
            for place, name in enumerate(self.dealt, 1):
                value = (
                    sum(
                        coefficient * pow(place, power, P)
                        for power, coefficient in enumerate(coefficients)
                    )
                    % P
                )
                self.dealt[name] += value.to_bytes(33, "big")

    def share_cipher(self, other: str, *way: str) -> ChaCha20Poly1305:
        shared = exchange(self.cipher, self.cohort[other]["cipher"])
        return ChaCha20Poly1305(extract(shared, "share", *self.scope, self.cohort_digest(), *way))

    def encrypt_share(self, receiver: str) -> str:
        sealed = self.share_cipher(receiver, self.name, receiver).encrypt(
            bytes(12), self.dealt[receiver], None
        )
        return sealed.hex()

    def reveal(self) -> dict[str, str]:
        found = {self.name: self.dealt[self.name]}
        for name, sealed in self.shares.items():
            found[name] = self.share_cipher(name, name, self.name).decrypt(
                bytes(12), bytes.fromhex(sealed), None
            )
        return {
            name: (both[33:] if name in self.survivors else both[:33]).hex()
            for name, both in found.items()
        }

    # The contribution

    def contribute(self, received: Tensors) -> None:
        nodes, share = self.spec["nodes"], max(1, round(min(self.weight, CAP) / CAP * 2**24))
        most = 2 ** (31 - math.ceil(math.log2(nodes))) - 1
        self.words = {"masked.weight": np.array(share, np.uint32)}
        for name, tensor in self.spec["tensors"].items():
            moved = (received[name] + np.float32(self.shift)).astype(np.float64) - received[name]
            steps = np.rint(moved * share * 2.0 ** (tensor["scale"] - 24)).clip(-most, most)
            self.words[name] = np.asarray(steps.astype(np.int64) % 2**32, np.uint32)
        self.round = self.state["round"]
        self.offer()

    def offer(self) -> None:
        """Contribute, once there are words and masks."""
        if not self.counted or self.round != self.masked_round:
            return
        masked = {name: self.words[name].copy() for name in sorted(self.words)}
        self.add_mask(masked, extract(self.own, "own mask", *self.scope, self.name), plus=True)
        for name in {*self.shares} | ({*self.neighbours} & {*self.counted}):
            shared = exchange(self.agreement, self.cohort[name]["agreement"])
            seed = extract(shared, "pair mask", *self.scope, *sorted((self.name, name)))
            self.add_mask(masked, seed, plus=self.name < name)
        blob = save(masked)
        digest = hashlib.sha256(blob).hexdigest()
        self.offered = {digest: blob}
        manifest = self.state["broadcast"] | {
            "node": self.name,
            "digest": digest,
            "size": len(blob),
        }
        self.contribution = {"type": "Contribution", "run": self.spec["run"], "round": self.round}
        self.contribution |= {"weight": 1, "blob": manifest}
        self.tell("up", **self.contribution)

    def add_mask(self, words: Tensors, seed: bytes, *, plus: bool) -> None:
        stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
        for name, each in words.items():
            drawn = struct.unpack(f"<{each.size}I", stream.update(bytes(4 * each.size)))
            mask = np.array(drawn, np.uint32).reshape(each.shape)
            words[name] = np.asarray(each + mask if plus else each - mask, np.uint32)


def told(keys: dict[str, Any]) -> list[str]:
    """What is signed of a node's keys."""
    return [
        keys["agreement"],
        keys["cipher"],
        keys["commitment"],
        ",".join(map(str, keys["classes"])),
    ]


def public(private: bytes) -> str:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def exchange(private: bytes, other: str) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).exchange(
        X25519PublicKey.from_public_bytes(bytes.fromhex(other))
    )


def expand(secret: bytes, purpose: str) -> bytes:
    """HKDF-Expand, as RFC 5869 has it for one block."""
    info = b"\0".join((b"edge-node/v1", b"masks", purpose.encode()))
    return hmac.digest(secret, info + b"\x01", "sha256")


def extract(secret: bytes, *parts: str) -> bytes:
    info = "\0".join(("edge-node/v1", *parts)).encode()
    return HKDF(SHA256(), 32, None, info).derive(secret)


# what the page's tables of fields have as defaults
DEFAULTS: dict[str, Any] = {
    "threads": 1,
    "sample": 0,
    "deadline": 0.0,
    "aggregation": {},
    "relays": {},
    "aliases": {},
    "head": "trained",
    "statistics": {},
    "statistics_first": False,
    "first_totals": False,
    "codec": "none",
    "encryption": "none",
    "mask_threshold": 0,
    "mask_neighbours": 0,
    "privacy": None,
    "revision": 0,
    "chooses": False,
}
DEFAULTS_WITHIN: dict[str, dict[str, Any]] = {
    "preprocessing": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    "training": {
        "learning_rate": 0.001,
        "local_epochs": 3,
        "batch_size": 32,
        "augment": True,
        "batch_norm": "train",
        "moments": "keep",
        "optimizer": "adam",
    },
    "aggregation": {"rule": "mean", "liars": 0},
}


def digest(spec: dict[str, Any]) -> str:
    """The digest of a spec, which the scope of masks ends with."""
    fields = {name: value for name, value in spec.items() if name != "type"}
    for name, defaults in DEFAULTS_WITHIN.items():
        fields[name] = without_defaults(fields[name], defaults)
    fields["tensors"] = {
        name: without_defaults(each, {"dtype": "float32"})
        for name, each in fields["tensors"].items()
    }
    text = json.dumps(
        numbers(without_defaults(fields, DEFAULTS)), sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(f"Spec\n{text}".encode()).hexdigest()


def without_defaults(fields: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name not in defaults or value != defaults[name]
    }


def numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    return struct.pack(">d", value).hex() if isinstance(value, float) else value
