"""Hostile bytes as frames of a line: `python -m tests.support.fuzz_frames 100000` prints what
became of them.

A frame may be refused by DecodeError; nothing else may come of it: no other exception, no hang, no
growth of memory. What is let through is a frame, which comes back as it was. The seed is printed:
with it the same frames come again.
"""

import argparse
import math
import random
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from broker_config.protocol.codec import DecodeError
from edge_node.extensions.vfl.frames import (
    LARGEST_FRAME,
    PART,
    AnyFrame,
    Embedded,
    Embeddings,
    Graded,
    Opened,
    Represented,
    decode_frame,
    encode_frame,
)
from tests.support.frame_mutation import HUGE, TEXTS
from tests.support.fuzz import bombard, check_words

FRAMES = 1000
RUN = "0123456789abcdef"
NUMBERS = (
    *(each for each in HUGE if -(1 << 63) <= each < 1 << 64),
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -0.0,
    0.5,
)
WRONG = (
    *NUMBERS,
    *TEXTS,
    None,
    True,
    [],
    {},
    b"",
    b"\xff" * 7,
    [[]],
    [None],
    [-1],
    [1 << 40],
    [math.nan],
    {"": b""},
)
HEADERS = tuple(
    bytes([kind]) + b"\xff" * size
    for kind, size in (
        (0xC6, 4),
        (0xC5, 2),
        (0xC9, 5),
        (0xDB, 4),
        (0xDD, 4),
        (0xDF, 4),
        (0xDE, 2),
        (0xD9, 1),
    )
)
NESTED = (
    b"\x91",
    b"\x81\xa4type",
    b"\x81\xa1a",
    b"\x81\x91",
    b"\xdd\x00\x00\x00\x01",
    b"\xdf\x00\x00\x00\x01\xa3run",
)


def samples() -> list[AnyFrame]:
    """A frame of each kind, full and least."""
    at: dict[str, Any] = {"run": RUN, "attempt": 3, "round": 7}
    return [
        Opened(**at, first=0, last=3, since=1, products=("p-1", "ü" * 64), part=1, parts=2),
        Opened(**at, first=0, last=0, since=0, products=()),
        Embeddings(
            **at,
            session=RUN,
            row=5,
            received=bytes(448),
            second=bytes(448),
            missing=(0, 3),
            part=1,
            parts=3,
            collection=1.5,
            embedding=0.25,
            iteration=1e-3,
        ),
        Embeddings(**at, session=RUN, row=0, received=b""),
        Represented(
            **at,
            row=0,
            head=bytes(908),
            embeddings=(bytes(64), bytes(128)),
            labels=bytes(8),
            iterations=(1, 0),
            part=0,
            parts=2,
        ),
        Represented(**at, row=0, embeddings=(), labels=b"", iterations=()),
        Represented(**at, row=0, embeddings=(bytes(PART),), labels=bytes(600), iterations=(2,)),
        Embedded(run=RUN, round=9, product="p-1", embedding=bytes(112)),
        *(_graded(size) for size in (0, 112)),
    ]


def _graded(size: int) -> Graded:
    """Whatever its further fields are: they have numbers or arrays."""
    plain = {
        "run": RUN,
        "attempt": 3,
        "round": 7,
        "row": 0,
        "gradient": bytes(size),
        "iterations": 2,
    }
    further = {each.encode_name: 0.0 for each in msgspec.structs.fields(Graded) if each.required}
    return msgspec.convert(further | plain, Graded)


class FrameMutator:
    """Makes hostile frames of good ones; from the same random numbers always the same."""

    def __init__(self, random: Random):
        self.random = random
        self._whole = [encode_frame(frame) for frame in samples()]

    def payload(self) -> bytes:
        """Bytes that are not, or not quite, a frame."""
        whole = self.random.choice(self._whole)
        change = self.random.choice(
            (self._bytes, self._bytes, self._fields, self._fields, self._headers, self._deep)
        )
        return change(whole)

    def _bytes(self, whole: bytes) -> bytes:
        """Some flipped, cut, repeated, joined, or too many."""
        random, data = self.random, bytearray(whole)
        match random.randrange(6):
            case 0:
                for _ in range(random.randint(1, 8)):
                    data[random.randrange(min(len(data), 400))] = random.randrange(256)
            case 1:
                del data[random.randrange(len(data)) :]
            case 2:
                first, last = sorted(random.choices(range(min(len(data), 400)), k=2))
                del data[first:last]
            case 3:
                data *= random.choice((2, 3))
            case 4:
                data[random.randrange(len(data)) :] = random.choice(self._whole)
            case _:
                data = bytearray(random.randbytes(random.choice((0, 1, 4, 100, 5000))))
        return bytes(data)

    def _fields(self, whole: bytes) -> bytes:
        """Well-formed, with other fields, values and types."""
        random, fields = self.random, msgspec.msgpack.decode(whole)
        for _ in range(random.randint(1, 3)):
            name = random.choice(sorted(fields) or ["type"])
            match random.randrange(6):
                case 0:
                    fields.pop(name, None)
                case 1:
                    fields[random.choice(TEXTS)] = random.choice(WRONG)
                case 2:
                    fields["type"] = random.choice(
                        ("Opened", "Embeddings", "Represented", "Graded", "Embedded", 7)
                    )
                case 3:
                    fields[name] = [random.choice(WRONG)] * random.choice((1, 64, 65, 10_001))
                case 4:
                    fields[name] = fields.get(random.choice(sorted(fields) or ["type"]))
                case _:
                    fields[name] = random.choice(WRONG)
        return msgspec.msgpack.encode(fields)

    def _headers(self, whole: bytes) -> bytes:
        """Lengths that promise far more than comes."""
        place = self.random.randrange(min(len(whole), 400))
        return (
            whole[:place]
            + self.random.choice(HEADERS)
            + whole[place + self.random.choice((0, 1, 5)) :]
        )

    def _deep(self, whole: bytes) -> bytes:
        """Nested far deeper than anybody looks, also longer than a frame may be."""
        nested = self.random.choice(NESTED) * self.random.choice((100, 5_000, 300_000))
        place = self.random.choice((0, self.random.randrange(min(len(whole), 400))))
        return (whole[:place] + nested + whole[place:])[
            : LARGEST_FRAME + self.random.choice((0, 1, -1))
        ]


def feed(payload: bytes) -> bool:
    """Have it decoded; False if it was refused."""
    try:
        frame = decode_frame(payload)
    except DecodeError as refusal:
        check_words(str(refusal))
        return False
    assert len(payload) <= LARGEST_FRAME
    for value in _values(frame):
        assert not isinstance(value, float) or 0 <= value < math.inf, frame
    assert decode_frame(encode_frame(frame)) == frame
    return True


def _values(frame: AnyFrame) -> Iterator[object]:
    yield from msgspec.structs.asdict(frame).values()


def attack(frames: int, seed: int) -> str:
    """Have so many decoded; return a line about it.

    AssertionError if one was a bug, or memory grew.
    """
    mutator = FrameMutator(Random(f"{seed} frames"))
    return bombard("frames", lambda: feed(mutator.payload()), frames)


def main() -> None:
    """Send many, and say what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("frames", type=int)
    parser.add_argument("--seed", type=int, default=random.getrandbits(32))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    print(attack(given.frames, given.seed))


if __name__ == "__main__":
    main()
