"""``bertsmith serve``: models behind HTTP, and a page for people.

It never knows an endpoint.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import log
from bertsmith.cli.model_options import Device, check_device, resolve_device
from bertsmith.cli.models import find_model
from bertsmith.errors import MissingExtraError, SettingsError
from bertsmith.settings import user_settings

#: Where the key may stand, so that it is in no list of processes.
API_KEY_VARIABLE = "BERTSMITH_API_KEY"


@app.command()
def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL…",
            help="Model directories, RUNs or models of the hub, each with a name if need be: "
            "NAME=MODEL.",
            show_default=False,
        ),
    ],
    host: Annotated[
        str,
        typer.Option(help="The address to listen at; 0.0.0.0 lets other machines in."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"What clients must send as Authorization: Bearer KEY; else ${API_KEY_VARIABLE}. Browsers ask "
            "for it as a password.",
            show_default=False,
        ),
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(help="A page of this origin may ask from a browser; * for any."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Another name by which browsers and proxies ask, such as bert.example.com; * for "
            "any. Without it, a loopback --host answers to itself alone, any other to all names.",
            show_default=False,
        ),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Vectors in 8 or 16 bits: quicker, nearly the same.")
    ] = False,
    page: Annotated[bool, typer.Option(help="A page for people at /.")] = True,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads that compute; else all.", min=1)
    ] = None,
    device: Device = "auto",
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", help="A limit, such as serve.body_bytes=1000000."),
    ] = None,
) -> None:
    """Serve models over HTTP: vectors, masks, labels, entities, answers; and a page at /.

    OpenAI's clients ask /v1/embeddings; /docs lists all endpoints, and /metrics is for Prometheus.
    Ctrl-C, SIGTERM or SIGHUP finishes what is under way.
    """
    # Threads of a product that wait for each other else spin, and take the cores from those that
    # read requests. Read when PyTorch is loaded, which is now.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    check_device(device)
    key = _key(api_key)
    said = user_settings(None, {}, assign or [])
    if set(said) - {"serve"}:
        raise SettingsError(f"--set {next(iter(said))}: expected serve.… , such as serve.seconds=5")
    named = _named(models)
    try:
        from bertsmith.serve.hosts import allowed_hosts
        from bertsmith.serve.server import bind_socket, serve_until_signal, start_listening
        from bertsmith.serve.settings import ServeSettings

        settings = ServeSettings.parse(said.get("serve", {}), "--set serve")
        own = bind_socket(host, port)
        hosts = allowed_hosts(host, own.getsockname()[0], allow_host or ())
        found = [find_model(Path(path)) for _, path in named]
        from bertsmith.serve.app import create_app
        from bertsmith.serve.models import load_served_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(str(error.name), "serve", "serving") from None
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    device = resolve_device(device)
    loaded = []
    for (name, path), directory in zip(named, found, strict=True):
        loaded.append(load_served_model(name, directory, device=device, fast=fast))
        log(f"{name}: {path} can {', '.join(sorted(loaded[-1].abilities))}")
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING)
    made = None
    if page:
        # Gradio costs seconds, and would ask its makers whether it is the newest.
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        from bertsmith.serve.page import mount

        made = mount
    guarded = create_app(
        loaded, settings, key=key, origins=cors or (), hosts=hosts, mount_page=made
    )
    start_listening(own)
    shown = f"[{host}]" if ":" in host else host
    log(f"serving at http://{shown}:{own.getsockname()[1]} (endpoints: /docs); Ctrl-C ends it")
    serve_until_signal(guarded, settings, own)


def _key(given: str | None) -> str | None:
    """Return the server's key, given or of the environment; None for a server that has none.

    Raises SettingsError for an empty one: a variable that was meant to be filled, and a server
    that stands open.
    """
    place, key = (
        ("--api-key", given)
        if given is not None
        else (f"${API_KEY_VARIABLE}", os.environ.get(API_KEY_VARIABLE))
    )
    if key is not None and not key.strip():
        raise SettingsError(f"{place} is empty; give a key, or unset it to serve everybody")
    # A file's last line break is no part of it, and clients cannot send one.
    return key and key.strip()


def _named(models: list[str]) -> list[tuple[str, str]]:
    """Return the name and the path of each model. Raises SettingsError for a name given twice."""
    found: dict[str, str] = {}
    for given in models:
        name, equals, path = given.partition("=")
        if not equals or "/" in name:
            name, path = _usual(given), given
        if not name or name in found:
            raise SettingsError(
                f"{given}: the name {name!r} is taken; give each model its own: NAME=MODEL"
            )
        found[name] = path
    return list(found.items())


def _usual(path: str) -> str:
    """Return what a model is called that nobody named: its folder; a RUN's, not its model/."""
    whole = Path(path)
    here = whole.resolve() if whole.exists() else whole
    here = here.parent if here.is_file() else here
    return here.parent.name if here.name == "model" else here.name
