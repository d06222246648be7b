"""A secret is made of any t of its shares, and of no fewer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_config.security.secret_sharing import PRIME, SHARE_BYTES, Interpolation, split

secrets_ = st.binary(min_size=32, max_size=32)


@st.composite
def shared(draw: st.DrawFn) -> tuple[bytes, int, dict[int, bytes]]:
    """A secret, how many shares make it, and all of them by point."""
    secret, members = draw(secrets_), draw(st.integers(1, 12))
    threshold = draw(st.integers(1, members))
    coefficients = draw(
        st.lists(st.integers(0, PRIME - 1), min_size=threshold - 1, max_size=threshold - 1)
    )
    points = range(1, members + 1)
    return secret, threshold, dict(zip(points, split(secret, coefficients, points), strict=True))


@given(shared(), st.randoms())
def test_any_as_many_as_the_threshold_make_the_secret(
    case: tuple[bytes, int, dict[int, bytes]], chance: random.Random
) -> None:
    secret, threshold, shares = case
    chosen = chance.sample(sorted(shares), threshold)
    assert all(len(each) == SHARE_BYTES for each in shares.values())
    assert Interpolation(chosen).combine(shares) == secret
    assert Interpolation(sorted(shares)).combine(shares) == secret


@given(secrets_, secrets_, st.integers(2, 8))
def test_fewer_shares_than_the_threshold_fit_every_secret(
    secret: bytes, other: bytes, threshold: int
) -> None:
    """Whatever the secret is, there is a polynomial through it and the shares that somebody has."""
    chance = random.Random(secret)
    coefficients = [chance.randrange(PRIME) for _ in range(threshold - 1)]
    known = dict(enumerate(split(secret, coefficients, range(1, threshold)), 1))
    points = [0, *known]
    values = [
        int.from_bytes(other, "big"),
        *(int.from_bytes(each, "big") for each in known.values()),
    ]
    missing = threshold  # the point whose share they do not have
    value = (
        sum(
            of_point * _basis(point, points, missing)
            for point, of_point in zip(points, values, strict=True)
        )
        % PRIME
    )
    fitting = known | {missing: value.to_bytes(SHARE_BYTES, "big")}
    assert Interpolation([*fitting]).combine(fitting) == other


def _basis(point: int, points: list[int], at: int) -> int:
    found = 1
    for each in points:
        if each != point:
            found = found * (at - each) * pow(point - each, -1, PRIME) % PRIME
    return found


def test_a_share_of_another_secret_makes_another_one_or_none() -> None:
    chance = random.Random(7)
    coefficients = [chance.randrange(PRIME) for _ in range(3)]
    shares = dict(enumerate(split(b"s" * 32, coefficients, range(1, 5)), 1))
    shares[2] = split(b"t" * 32, coefficients, [2])[0]
    assert Interpolation([1, 2, 3, 4]).combine(shares) != b"s" * 32
    with pytest.raises(ValueError, match="one secret"):
        Interpolation([1]).combine({1: (PRIME - 1).to_bytes(SHARE_BYTES, "big")})


def test_the_modulus_is_a_prime() -> None:
    """By Miller and Rabin's test to forty bases."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    chance = random.Random(1)
    for _ in range(40):
        power = pow(chance.randrange(2, PRIME - 1), odd, PRIME)
        squares = [
            power := power if number == 0 else power * power % PRIME for number in range(twos)
        ]
        assert squares[0] == 1 or PRIME - 1 in squares
