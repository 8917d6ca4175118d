"""Binds the sockets that a server listens on."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from bertsmith.errors import SettingsError
from bertsmith.files import hold_lock

#: Connections that the operating system queues until they are accepted.
_BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address.

    Raises:
        SettingsError: the address is empty or cannot be bound.
    """
    if not host.strip():
        # The socket API would listen on all interfaces.
        raise SettingsError(
            "--host is empty; give an address, such as 127.0.0.1 for this machine only or 0.0.0.0 "
            "for all interfaces"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    # A new server can start while connections of the previous one are still closing.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise _create_listen_error(host, port, error) from None
    return sock


def start_listening(sock: socket.socket) -> None:
    """Accept connections on a bound socket.

    Raises:
        SettingsError: another process listens on the port; binding alone does not detect this.
    """
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        if sock.family == socket.AF_UNIX:
            raise
        host, port = sock.getsockname()[:2]
        sock.close()
        raise _create_listen_error(host, port, error) from None


def _create_listen_error(host: str, port: int, error: OSError) -> SettingsError:
    return SettingsError(
        f"cannot listen at {host}, port {port}: {error.strerror or error}; give another --port "
        "or --host, or stop the process that listens there"
    )


@contextmanager
def bind_unix_socket(path: Path) -> Iterator[socket.socket]:
    """Yield a unix socket at a path, which its user and group can connect to; remove it afterwards.

    The file of a server that has crashed is replaced. A lock protects the file until the end of the
    block, because connecting does not detect a server that loads its models and listens later.

    Raises:
        SettingsError: another server uses the path, or the path cannot be used.
    """
    in_use = SettingsError(f"--uds {path}: another server uses it; stop it, or give another path")
    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(path.parent / f".{path.name}.lock", error=in_use))
            if path.is_socket():
                # Earlier versions hold no lock.
                with socket.socket(socket.AF_UNIX) as client, suppress(ConnectionRefusedError):
                    client.connect(str(path))
                    raise in_use
                path.unlink()
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(path))
            stack.callback(path.unlink, missing_ok=True)
            path.chmod(0o660)
        except OSError as error:
            raise SettingsError(
                f"--uds {path}: cannot create the socket: {error.strerror or error}; give another "
                "path"
            ) from None
        yield sock
