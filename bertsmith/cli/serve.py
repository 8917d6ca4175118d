"""``bertsmith serve``: serve models over HTTP, with a web page."""

import ipaddress
import logging
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log
from bertsmith.cli.model_options import (
    REFERENCE_MODEL,
    Device,
    check_device,
    check_embedding_model,
    find_embedding_model,
    resolve_device,
)
from bertsmith.errors import BertsmithError, ModelError, RunError, SettingsError, require_extra
from bertsmith.settings import load_user_settings

if TYPE_CHECKING:
    from bertsmith.serve.options import ServerOptions
    from bertsmith.serve.tracing import Tracing

#: Environment variable of the API key; unlike an option, it is not visible in process lists.
API_KEY_VARIABLE = "BERTSMITH_API_KEY"
#: Matches the header Origin in lower case, also that of a local file and of a browser extension.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+|null")


@app.command(
    epilog=format_examples(
        "bertsmith serve",
        "bertsmith serve bert=my-run mood=my-classifier --port 9000",
        "BERTSMITH_API_KEY=secret bertsmith serve my-run --host 0.0.0.0",
    )
)
def serve(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directories, run directories, names of reference models or Hub ids. "
            f"NAME=MODEL sets a model's name. Default: {REFERENCE_MODEL}.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; with 0.0.0.0, other machines can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that clients must send as Authorization: Bearer KEY; the web page asks for "
            f"it. Default: ${API_KEY_VARIABLE}.",
            show_default=False,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with a table for each API key: [NAME], key, and optionally "
            "requests_per_minute and tokens_per_minute. SIGHUP reads it again.",
            show_default=False,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may send requests (CORS), or * for any; may be repeated."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional host name to accept in requests, such as bert.example.com, or * for "
            "any; may be repeated. Default: only the loopback names if --host is a loopback "
            "address, else any.",
            show_default=False,
        ),
    ] = None,
    uds: Annotated[
        Path | None,
        typer.Option(
            help="Path of a unix socket to listen on instead of --host and --port.",
            show_default=False,
        ),
    ] = None,
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(
            help="PEM file with the TLS certificate chain; serves HTTPS. SIGHUP reads it again.",
            show_default=False,
        ),
    ] = None,
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(help="PEM file with the private key of --ssl-certfile.", show_default=False),
    ] = None,
    root_path: Annotated[
        str,
        typer.Option(
            help="Path under which a proxy publishes the server, such as /bert, if the proxy "
            "removes it from requests.",
            show_default=False,
        ),
    ] = "",
    forwarded_allow_ips: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto are "
            "used, or * for any, which --uds needs; may be repeated. Default: none.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Use weights of 8 or 16 bits: faster, with nearly equal results."
        ),
    ] = False,
    page: Annotated[
        bool, typer.Option(help="Serve a web page at / that uses the JSON endpoints.")
    ] = True,
    threads: Annotated[
        int | None, typer.Option(help="Number of CPU threads. Default: all cores.", min=1)
    ] = None,
    workers: Annotated[
        int,
        typer.Option(
            help="Number of processes that serve the same port, each with its own copy of the "
            "models and its share of the CPU threads; for machines with many cores.",
            min=1,
        ),
    ] = 1,
    device: Device = "auto",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A limit, such as serve.max_body_bytes=1000000; may be repeated."
        ),
    ] = None,
) -> None:
    """Serve models over HTTP, with a web page.

    Open the address in a browser to try the models. /docs describes all endpoints. /v1/embeddings
    is compatible with OpenAI clients, and /metrics with Prometheus. Ctrl-C and SIGTERM finish the
    current requests and stop the server. SIGHUP loads models, keys and certificates again.
    """
    # Set before PyTorch is imported. With the default policy, idle OpenMP threads busy-wait and use
    # the cores that the threads that read requests need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_device(device)
    key = _resolve_api_key(api_key, key_file)
    certificate = _resolve_certificate(ssl_certfile, ssl_keyfile)
    limits = _resolve_limits(assignments or [])
    named_models = _name_models(models or [REFERENCE_MODEL])
    _check_proxies(forwarded_allow_ips or [], uds)
    origins = tuple(map(_normalize_origin, cors or ()))
    with require_extra("serve", "serving"):
        from bertsmith.serve.hosts import get_allowed_hosts
        from bertsmith.serve.options import ServerOptions
        from bertsmith.serve.settings import ServeSettings
        from bertsmith.serve.sockets import bind_socket, bind_unix_socket
        from bertsmith.serve.terminal import ignore_hangups

        # A server reloads on SIGHUP, so the signal must not end it while it loads its models.
        context.with_resource(ignore_hangups())
        settings = ServeSettings.parse(limits, "--set serve")
        if uds is None:
            server_socket = bind_socket(host, port)
            bound_host, bound_port = server_socket.getsockname()[:2]
            hosts = get_allowed_hosts(host, bound_host, allow_host or ())
            url_host = f"[{host}]" if ":" in host else host
            scheme = "http" if certificate is None else "https"
            address = f"{scheme}://{url_host}:{bound_port}"
        else:
            server_socket = context.with_resource(bind_unix_socket(uds))
            hosts = get_allowed_hosts("localhost", "127.0.0.1", allow_host) if allow_host else None
            address = str(uds)
        for _, path in named_models:
            check_embedding_model(path)
    options = ServerOptions(
        models=tuple(named_models),
        settings=settings,
        device=device,
        fast=fast,
        num_threads=threads,
        api_key=key,
        key_file=key_file,
        origins=origins,
        hosts=hosts,
        has_page=page,
        root_path=_normalize_root_path(root_path),
        trusted_proxies=tuple(forwarded_allow_ips or ()),
        certificate=certificate,
        num_processes=workers,
    )
    if not models:
        log(f"no MODEL given; serving the reference model {REFERENCE_MODEL}")
    # Also checks the variables for the processes of a supervisor, which create their own.
    tracing = _create_tracing() if _has_tracing() else None
    message = f"serving at {address} (API: /docs); Ctrl-C stops the server"
    if workers == 1:
        _run_process(options, server_socket, message, tracing)
    else:
        if tracing is not None:
            tracing.close()
        _run_supervisor(options, server_socket, message)


def _run_process(
    options: "ServerOptions", sock: socket.socket, message: str, tracing: "Tracing | None"
) -> None:
    """Run a server in this process; ``message`` is logged when it serves."""
    with require_extra("serve", "serving"):
        from bertsmith.serve.launch import ServerProcess
    options = replace(options, device=resolve_device(options.device))
    process = ServerProcess(options, open_model, _log_if_possible, tracing)
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    process.run(sock, message)
    if process.has_failed:
        raise RunError("a model thread has died: its error is above; restart the server")


def _log_if_possible(text: str) -> None:
    """Print a message on stderr; a server continues to run if stderr cannot be written."""
    # rich raises SystemExit if the reader of stderr has exited.
    with suppress(OSError, SystemExit):
        log(text)


@contextmanager
def open_model(model: Path) -> Iterator[Path]:
    """Yield the path of a model; a snapshot of an unfinished run is deleted afterwards.

    Raises:
        ModelError: there is neither a model nor a checkpoint that can be read.
    """
    try:
        path = find_embedding_model(model)
    except RunError as error:
        # A RunError would mean that the process failed, so that a supervisor would restart it.
        raise ModelError(str(error)) from None
    try:
        yield path
    finally:
        if path != model:
            shutil.rmtree(path, ignore_errors=True)


def _run_supervisor(options: "ServerOptions", sock: socket.socket, message: str) -> None:
    """Run a server in several processes, which share a temporary folder."""
    with require_extra("serve", "serving"):
        from prometheus_client.multiprocess import mark_process_dead

        from bertsmith.serve.sockets import start_listening
        from bertsmith.serve.supervisor import Supervisor
    start_listening(sock)
    with TemporaryDirectory(prefix="bertsmith-serve-") as directory:
        # prometheus_client reads this variable when the new processes import it.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
        options = replace(options, shared_directory=Path(directory))
        Supervisor(
            partial(_run_worker, options, message),
            sock,
            options.num_processes,
            log=_log_if_possible,
            on_exit=partial(mark_process_dead, path=directory),
        ).run()


def _run_worker(options: "ServerOptions", message: str, sock: socket.socket) -> None:
    """Run a server in a process of the supervisor; exit with STARTUP_FAILURE after an error."""
    from bertsmith.serve.supervisor import STARTUP_FAILURE

    try:
        tracing = _create_tracing() if _has_tracing() else None
        _run_process(options, sock, f"{message} [process {os.getpid()}]", tracing)
    except BertsmithError as error:
        log(f"error: {error}")
        sys.exit(1 if isinstance(error, RunError) else STARTUP_FAILURE)


def _resolve_limits(assignments: list[str]) -> dict[str, Any]:
    """Return the settings of ``--set serve.…``; SettingsError for settings of other tables."""
    overrides = load_user_settings(None, {}, assignments)
    if set(overrides) - {"serve"}:
        raise SettingsError(
            f"--set {next(iter(overrides))}: expected a setting of the table serve, such as "
            "serve.request_timeout_seconds=5"
        )
    limits: dict[str, Any] = overrides.get("serve", {})
    return limits


def _has_tracing() -> bool:
    """Return whether the standard variables of OpenTelemetry configure an exporter of traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    endpoints = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter not in ("", "otlp", "none"):
        raise SettingsError(f"OTEL_TRACES_EXPORTER is {exporter!r}; expected otlp or none")
    return exporter != "none" and (exporter == "otlp" or any(map(os.environ.get, endpoints)))


def _create_tracing() -> "Tracing":
    """Return an object that sends traces; MissingExtraError without the extra."""
    with require_extra("telemetry", "tracing"):
        from bertsmith.serve.tracing import create_tracing
    return create_tracing()


def _resolve_certificate(
    certificate: Path | None, private_key: Path | None
) -> tuple[Path, Path] | None:
    """Return the files for TLS; None for HTTP. SettingsError if only one of them is given."""
    if certificate is None and private_key is None:
        return None
    if certificate is None or private_key is None:
        missing = "--ssl-certfile" if certificate is None else "--ssl-keyfile"
        raise SettingsError(f"TLS needs a certificate and its private key; add {missing} FILE")
    return certificate, private_key


def _check_proxies(addresses: list[str], uds: Path | None) -> None:
    """Raise SettingsError for an address of a proxy that would have no effect."""
    if "*" in addresses and len(addresses) > 1:
        raise SettingsError("--forwarded-allow-ips '*' accepts any address; leave out the others")
    for address in addresses:
        if uds is not None and address != "*":
            raise SettingsError(
                f"--forwarded-allow-ips {address}: connections to a unix socket have no address; "
                "use '*', which accepts the headers of all users of the socket"
            )
        try:
            if address != "*":
                ipaddress.ip_network(address)
        except ValueError as error:
            raise SettingsError(
                f"--forwarded-allow-ips {address}: {error}; give an IP address, a network such as "
                "10.0.0.0/8, or '*' for any"
            ) from None


def _normalize_origin(origin: str) -> str:
    """Return an origin as browsers send it, in lower case and without a slash at the end.

    Raises SettingsError for a value that no browser sends.
    """
    normalized = origin.lower().rstrip("/")
    if normalized != "*" and not _ORIGIN.fullmatch(normalized):
        raise SettingsError(
            f"--cors {origin}: not an origin; give a scheme, a host and maybe a port, such as "
            "https://app.example.com, or '*' for any"
        )
    return normalized


def _normalize_root_path(root_path: str) -> str:
    """Return a root path that starts with a slash and does not end with one; empty for none."""
    path = root_path.strip("/")
    return f"/{path}" if path else ""


def _resolve_api_key(api_key: str | None, key_file: Path | None) -> str | None:
    """Return the API key of the option or the environment; None if neither is set.

    Raises SettingsError for an empty key, because a server without a key would accept everyone; or
    if there is a key file too.
    """
    origin = f"${API_KEY_VARIABLE}" if api_key is None else "--api-key"
    key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
    if key is not None and key_file is not None:
        raise SettingsError(f"{origin} and --key-file exclude each other; add the key to the file")
    if key is not None and not key.strip():
        raise SettingsError(f"{origin} is empty; set a key, or unset it to serve without one")
    # A key read from a file ends with a line break, which clients cannot send.
    return None if key is None else key.strip()


def _name_models(models: list[str]) -> list[tuple[str, Path]]:
    """Return the name and the path of each MODEL argument.

    Raises SettingsError for an empty or repeated name.
    """
    paths_by_name: dict[str, Path] = {}
    for argument in models:
        name, equals, path = argument.partition("=")
        if not equals or "/" in name:
            name, path = _get_default_name(argument), argument
        if not path:
            raise SettingsError(f"{argument!r}: no model; give MODEL or NAME=MODEL")
        if not name:
            raise SettingsError(f"{argument}: the model has no name; give it one: NAME=MODEL")
        if name in paths_by_name:
            raise SettingsError(
                f"{argument}: the name {name!r} is already used; give each model a name: NAME=MODEL"
            )
        paths_by_name[name] = Path(path)
    return list(paths_by_name.items())


def _get_default_name(model: str) -> str:
    """Return the name of a model's folder; for RUN/model, the name of the run directory."""
    path = Path(model)
    path = path.resolve() if path.exists() else path
    path = path.parent if path.is_file() else path
    return path.parent.name if path.name == "model" else path.name
