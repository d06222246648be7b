"""Groups of addresses that count as one client, where clients share something."""

import ipaddress


def client_group(address: str) -> str:
    """Return an IPv4 address as it is, and of an IPv6 one its /64 network: whoever has one of
    those addresses mostly has all of them.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # such as a socket's of this machine
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found.packed[:8] + bytes(8), 64)))
