"""Addresses of trusted proxies, and the addresses of clients that these proxies forward."""

import ipaddress
from collections.abc import Iterable
from typing import Final

#: Accepts the headers of every proxy.
ANY_PROXY: Final = "*"
_FORWARDED_FOR: Final = b"x-forwarded-for"


def add_mapped_addresses(addresses: Iterable[str]) -> list[str]:
    """Return addresses and networks, and the IPv4-mapped IPv6 form of those with IPv4.

    A socket that listens on ``::`` reports IPv4 peers in this form, such as ``::ffff:10.0.0.1``.

    Args:
        addresses: IP addresses, networks or ``ANY_PROXY``.
    """
    result = []
    for address in addresses:
        result.append(address)
        if address == ANY_PROXY:
            continue
        network = ipaddress.ip_network(address)
        if network.version == 4:
            mapped = f"::ffff:{network.network_address}"
            result.append(f"{mapped}/{96 + network.prefixlen}" if "/" in address else mapped)
    return result


def keep_last_forwarded_address(headers: list[tuple[bytes, bytes]]) -> None:
    """Remove all addresses of X-Forwarded-For but the last one, which the proxy has appended.

    The client chooses the addresses before it.

    Args:
        headers: names in lower case and values of the fields of a request's header; changed in
            place.
    """
    values = [value for name, value in headers if name == _FORWARDED_FOR]
    if values:
        headers[:] = [field for field in headers if field[0] != _FORWARDED_FOR]
        headers.append((_FORWARDED_FOR, values[-1].rpartition(b",")[2].strip()))
