"""A digest of all that a spec says, from which one-time secrets follow."""

import hashlib
from collections.abc import Iterator

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from broker_config.protocol.messages import (
    ImagePrivacy,
    Preprocessing,
    Spec,
    TensorSpec,
    Training,
)
from broker_config.security.one_time import bind, digest_spec
from tests.support.changed_specs import changed
from tests.support.wire_messages import CASES

SPEC = next(case for case in CASES if isinstance(case, Spec))


def test_every_field_of_a_spec_changes_its_digest() -> None:
    digests = {digest_spec(SPEC)}
    names = set()
    for name, other in changed(SPEC):
        digests.add(digest_spec(other))
        names.add(name)
    assert names == set(SPEC.__struct_fields__)
    assert len(digests) == 1 + sum(1 for _ in changed(SPEC))


def test_the_digest_is_that_of_the_page() -> None:
    """The text is written by hand, from docs/protocol.md."""
    spec = Spec(
        federation="steel",
        run="0123456789abcdef",
        software="0.1.0",
        method="fedavg",
        options={"epochs": 3, "share": 0.5},
        model="small",
        classes=("a", "b"),
        preprocessing=Preprocessing(size=32),
        training=Training(learning_rate=0.25),
        rounds=2,
        nodes=3,
        quorum=3,
        seed=7,
        tensors={"b": TensorSpec((2,), 51), "a": TensorSpec((), 3, "int64")},
        sends=("b",),
        privacy=ImagePrivacy(noise=2.0),
    )
    text = (
        '{"classes":["a","b"],"federation":"steel","method":"fedavg","model":"small","nodes":3,'
        '"options":{"epochs":3,"share":{"double":"3fe0000000000000"}},"preprocessing":{"size":32},'
        '"privacy":{"noise":{"double":"4000000000000000"}},"quorum":3,"rounds":2,"run":"0123456789abcdef",'
        '"seed":7,"sends":["b"],"software":"0.1.0",'
        '"tensors":{"a":{"dtype":"int64","scale":3,"shape":[]},"b":{"scale":51,"shape":[2]}},'
        '"training":{"learning_rate":{"double":"3fd0000000000000"}}}'
    )
    assert digest_spec(spec) == hashlib.sha256(f"Spec\n{text}".encode()).hexdigest()


def test_a_version_that_knows_more_fields_finds_the_same() -> None:
    class Later(msgspec.Struct, frozen=True, kw_only=True):
        federation: str = "steel"
        later: tuple[int, ...] = ()

    class Now(msgspec.Struct, frozen=True, kw_only=True):
        federation: str = "steel"

    Later.__name__ = "Now"
    assert digest_spec(Later()) == digest_spec(Now())  # type: ignore[arg-type]
    assert digest_spec(Later(later=(1,))) != digest_spec(Now())  # type: ignore[arg-type]


parts = st.lists(st.one_of(st.text(), st.binary()), max_size=4)


@given(parts, parts)
def test_no_two_sequences_of_parts_have_the_same_digest(
    one: list[str | bytes], other: list[str | bytes]
) -> None:
    same = list(encoded(one)) == list(encoded(other))
    assert (bind(*one) == bind(*other)) == same


def encoded(sequence: list[str | bytes]) -> Iterator[bytes]:
    for part in sequence:
        yield part.encode() if isinstance(part, str) else part
