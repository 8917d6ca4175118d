"""Check the Host header, as a defense against DNS rebinding."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.errors import SettingsError
from bertsmith.serve.clients import HEALTH_PATHS, get_path
from bertsmith.serve.errors import create_error_response

_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_HOST_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def get_allowed_hosts(host: str, address: str, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the host names that a server accepts, or None if it accepts every name.

    By default, a server on a loopback address accepts loopback names only. A server on another
    address accepts every name, because it cannot know its own names.

    Args:
        host: the value of the option --host.
        address: the IP address that the server is bound to.
        names: additional names: host names, addresses, ``*.example.com`` or ``*``.

    Raises:
        SettingsError: a name is not a host name.
    """
    normalized = [_normalize_host(name) for name in names]
    if "*" in normalized or (not names and not ipaddress.ip_address(address).is_loopback):
        return None
    return (*_LOOPBACK, _parse_host(host), address, *normalized)


class HostCheck:
    """ASGI middleware that refuses requests for other hosts.

    An attacker's site can let its own name resolve to this machine. The browser then treats this
    server as part of that site, whose scripts may read all responses; but the Host header still has
    the attacker's name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app for an allowed host, and answer requests for other hosts with 400."""
        # Health probes use the IP address of a pod or container as the host.
        if scope["type"] != "http" or get_path(scope) in HEALTH_PATHS:
            await self._app(scope, receive, send)
            return
        headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(headers) == 1 and self._is_allowed(headers[0]):
            await self._app(scope, receive, send)
            return
        name = ", ".join(headers)[:200] or "none"
        message = (
            f"the Host header is not an allowed name: {name}; use the server's own address, or "
            "start the server with --allow-host NAME"
        )
        await create_error_response(400, message)(scope, receive, send)

    def _is_allowed(self, header: str) -> bool:
        """Return whether the host of a Host header is allowed."""
        host = _parse_host(header)
        return any(_matches_host(host, allowed) for allowed in self._hosts)


def _matches_host(host: str, allowed: str) -> bool:
    """Return whether a host name equals an allowed name, or matches a name ``*.example.com``."""
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    return host == allowed


def _parse_host(header: str) -> str:
    """Return the host of a Host header, without port, brackets and trailing dot."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    # Several colons without brackets are an IPv6 address without a port.
    host = header if header.count(":") > 1 else header.partition(":")[0]
    return host.removesuffix(".")


def _normalize_host(name: str) -> str:
    """Return a name of --allow-host in lower case, without brackets and trailing dot.

    Raises:
        SettingsError: the name is not a host name.
    """
    lowered = name.strip().lower().removesuffix(".")
    if lowered == "*" or _HOST_NAME.fullmatch(lowered):
        return lowered
    try:
        return str(ipaddress.ip_address(lowered.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise SettingsError(
            f"--allow-host is not a host name: {name}; give a name without scheme and port, such "
            "as bert.example.com or *.example.com"
        ) from None
