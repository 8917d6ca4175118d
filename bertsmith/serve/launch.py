"""Start a server process: load models and keys, serve them, and reload them on SIGHUP."""

import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from bertsmith.errors import SettingsError
from bertsmith.files import describe_missing_path
from bertsmith.serve.app import create_app
from bertsmith.serve.keys import KeyRing, KeySettings, read_key_file
from bertsmith.serve.middleware import RequestMiddleware
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.options import ServerOptions
from bertsmith.serve.proxies import add_mapped_addresses
from bertsmith.serve.server import create_config, freeze_objects, serve_until_signal
from bertsmith.serve.shared_table import CounterTable, SharedTable

if TYPE_CHECKING:
    from bertsmith.serve.tracing import Tracing

#: Files of the tables that the processes share, in ``ServerOptions.shared_directory``. Clients can
#: fill the table of failed logins, which then loses its oldest entries.
_LIMITS_FILE: Final = "limits.bin"
_LOGINS_FILE: Final = "logins.bin"


class ServerProcess:
    """A server in this process."""

    def __init__(
        self,
        options: ServerOptions,
        open_model: Callable[[Path], AbstractContextManager[Path]],
        log: Callable[[str], None],
        tracing: "Tracing | None" = None,
    ) -> None:
        """Load the models and keys.

        Args:
            options: the options.
            open_model: takes a path of ``options.models`` and provides the path of a model, which
                may be temporary.
            log: prints a message.
            tracing: creates the spans of requests; None for no tracing.

        Raises:
            BertsmithError: a model, key or certificate cannot be used.
        """
        self._options = options
        self._open_model = open_model
        self._log = log
        self._tracing = tracing
        num_threads = options.num_threads or torch.get_num_threads()
        torch.set_num_threads(max(num_threads // options.num_processes, 1))
        limit_table = None
        self._login_table = None
        if options.shared_directory is not None:
            limit_table = SharedTable(options.shared_directory / _LIMITS_FILE)
            self._login_table = SharedTable(options.shared_directory / _LOGINS_FILE)
        self._keys = create_key_ring(options, limit_table)
        if options.certificate is not None:
            check_certificate(*options.certificate)
        self._app = self._create_app(self._load_models())
        self._app.control.is_supervised = options.num_processes > 1
        self._config = create_config(options.settings, **_get_uvicorn_options(options))

    @property
    def has_failed(self) -> bool:
        """Whether a model thread is dead."""
        return self._app.control.has_failed()

    def run(self, sock: socket.socket, message: str) -> None:
        """Serve the app on a bound socket until a signal stops it; log a message at the start."""
        serve_until_signal(
            self._app,
            self._config,
            self._options.settings,
            sock,
            self.reload,
            lambda: self._log(message),
        )

    def reload(self) -> None:
        """Load the models, keys and certificate again. After an error, nothing changes."""
        options = self._options
        try:
            keys = None if options.key_file is None else read_key_file(options.key_file)
            if options.certificate is not None:
                check_certificate(*options.certificate)
            models = self._load_models()
            if keys is not None:
                KeyRing(keys)  # Checks the keys.
            if options.certificate is not None and self._config.ssl is not None:
                self._config.ssl.load_cert_chain(*options.certificate)
            if keys is not None and self._keys is not None:
                self._keys.replace(keys)
        except Exception as error:  # noqa: BLE001 - an error must not end the thread
            self._log(f"reload failed, nothing changed: {error}")
            return
        self._app.control.replace_models(models)
        freeze_objects()
        self._log("reloaded the models" + (" and keys" if keys is not None else ""))

    def _load_models(self) -> list[ServedModel]:
        """Load all models, and log their tasks."""
        models = []
        for name, path in self._options.models:
            with self._open_model(path) as model_path:
                model = load_served_model(
                    name, model_path, device=self._options.device, fast=self._options.fast
                )
            models.append(model)
            self._log(f"{name}: {path}: {', '.join(sorted(model.tasks))}")
        return models

    def _create_app(self, models: list[ServedModel]) -> RequestMiddleware:
        options = self._options
        return create_app(
            models,
            options.settings,
            keys=self._keys,
            origins=options.origins,
            hosts=options.hosts,
            has_page=options.has_page,
            metrics_directory=options.shared_directory,
            login_table=self._login_table,
            tracing=self._tracing,
        )


def create_key_ring(options: ServerOptions, table: CounterTable | None = None) -> KeyRing | None:
    """Return the API keys of a server; None if it needs no key.

    Args:
        options: the options.
        table: table of the used limits of the keys, see ``KeyRing``.

    Raises:
        SettingsError: the key file is not valid.
    """
    if options.key_file is not None:
        keys = read_key_file(options.key_file)
    elif options.api_key is not None:
        keys = {"default": KeySettings(key=options.api_key)}
    else:
        return None
    return KeyRing(keys, has_page=options.has_page, table=table)


def check_certificate(certificate: Path, private_key: Path) -> None:
    """Raise SettingsError if a TLS certificate and its private key cannot be used."""
    for option, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", private_key)):
        if path.is_dir():
            raise SettingsError(f"{option} {path}: this is a folder; give a file")
        if not path.exists():
            raise SettingsError(f"{option} {describe_missing_path(path)}")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, private_key, password=""
        )
    except (ssl.SSLError, OSError) as error:
        raise SettingsError(
            f"--ssl-certfile {certificate}, --ssl-keyfile {private_key}: cannot be used: "
            f"{error.strerror or error}; give a PEM certificate chain and its key without password"
        ) from None


def _get_uvicorn_options(options: ServerOptions) -> dict[str, Any]:
    """Return the arguments of ``uvicorn.Config`` for a server."""
    arguments: dict[str, Any] = {"root_path": options.root_path}
    if options.trusted_proxies:
        arguments["proxy_headers"] = True
        arguments["forwarded_allow_ips"] = add_mapped_addresses(options.trusted_proxies)
    if options.certificate is not None:
        arguments["ssl_certfile"], arguments["ssl_keyfile"] = map(str, options.certificate)
    return arguments
