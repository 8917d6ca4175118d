"""Host names that a server answers to: a defence against DNS rebinding."""

import ipaddress
import re
from collections.abc import Sequence
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from bertsmith.errors import SettingsError
from bertsmith.serve.errors import error_response

#: Probes of orchestrators use the address of a pod or container.
_OPEN: Final = ("/health", "/ready")
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def allowed_hosts(host: str, address: str, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the host names that a server answers to; None for all.

    A server on a loopback address answers to that address alone, unless told other names. A server
    on another address answers to any name, since it cannot know them, unless told names.

    Args:
        host: the host as the user gave it.
        address: the IP address that the server is bound to.
        names: further names: host names, addresses, ``*.example.com`` or ``*``.

    Raises:
        SettingsError: a name is not a host name.
    """
    normalized = [_normalize(name) for name in names]
    if "*" in normalized or (not names and not ipaddress.ip_address(address).is_loopback):
        return None
    return (*_LOOPBACK, _host_of(host), address, *normalized)


class HostCheck:
    """ASGI middleware that refuses requests for other hosts.

    A page of another site can have its own name resolve to this machine. The browser then takes
    the server for a part of that site, and lets it read all answers; but it still sends the name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request for an allowed host, and answer any other with 400."""
        if scope["type"] != "http" or scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        headers = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(headers) == 1 and self._allows(headers[0]):
            await self._app(scope, receive, send)
            return
        name = ", ".join(headers)[:200] or "none"
        message = (
            f"the Host header is not an allowed name: {name}; ask by the server's own address, or "
            "start the server with --allow-host NAME"
        )
        await error_response(400, message)(scope, receive, send)

    def _allows(self, header: str) -> bool:
        host = _host_of(header)
        return any(
            host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed
            for allowed in self._hosts
        )


def _host_of(header: str) -> str:
    """Return the host of a Host header, without port, brackets and the dot of the root zone."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    # An IPv6 address without brackets has several colons, and no port.
    host = header if header.count(":") > 1 else header.partition(":")[0]
    return host.removesuffix(".")


def _normalize(name: str) -> str:
    lowered = name.strip().lower().removesuffix(".")
    if lowered == "*" or _NAME.fullmatch(lowered):
        return lowered
    try:
        return str(ipaddress.ip_address(lowered.removeprefix("[").removesuffix("]")))
    except ValueError:
        raise SettingsError(
            f"--allow-host is not a host name: {name}; give a name without scheme and port, such "
            "as bert.example.com or *.example.com"
        ) from None
