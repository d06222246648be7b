"""Shamir's secret sharing (1979): any t of n shares make a secret of 32 bytes,
fewer say nothing about it.

A share is a polynomial's value at a member's point, modulo a prime; the secret is its value at 0.
Ours, since the kept implementations share 16 bytes, and need seconds for the hundreds of secrets
that one set of members recovers: here what depends on the set alone is computed once.
"""

from collections.abc import Mapping, Sequence

PRIME = 2**256 + 297  # the smallest one above all secrets
SECRET_BYTES = 32
SHARE_BYTES = 33


def split(secret: bytes, coefficients: Sequence[int], points: Sequence[int]) -> list[bytes]:
    """The share at each of the points; as many as there are coefficients and one more make the
    secret.

    Args:
        secret: 32 bytes.
        coefficients: whole numbers that nobody can guess, near uniform modulo PRIME.
        points: different ones, from 1 on.
    """
    falling = [*reversed(coefficients), int.from_bytes(secret, "big")]
    shares = []
    for point in points:
        value = 0
        for coefficient in falling:
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


class Interpolation:
    """The recovery of secrets from shares at the same points (Lagrange's, at 0)."""

    def __init__(self, points: Sequence[int]):
        self._factors = {}
        for point in points:
            numerator = denominator = 1
            for other in points:
                if other != point:
                    numerator = numerator * other % PRIME
                    denominator = denominator * (other - point) % PRIME
            self._factors[point] = numerator * pow(denominator, -1, PRIME) % PRIME

    def combine(self, shares: Mapping[int, bytes]) -> bytes:
        """The secret of which these are the shares, by point.

        Raises:
            ValueError: they are shares of none.
        """
        total = (
            sum(
                factor * int.from_bytes(shares[point], "big")
                for point, factor in self._factors.items()
            )
            % PRIME
        )
        if total >= 1 << (8 * SECRET_BYTES):
            raise ValueError("these are no shares of one secret")
        return total.to_bytes(SECRET_BYTES, "big")
