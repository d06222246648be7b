"""One client is an IPv4 address, or a network of IPv6 addresses."""

import pytest

from edge.http.client_group import client_group


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "testclient", False),
    ],
)
def test_addresses_that_one_client_can_have_are_one(one: str, other: str, same: bool) -> None:
    assert (client_group(one) == client_group(other)) is same
