"""Options of a server process."""

from dataclasses import dataclass
from pathlib import Path

from bertsmith.serve.settings import ServeSettings


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server process; can be sent to other processes.

    Attributes:
        models: name and path of each model; the path may be that of an unfinished run.
        settings: the limits of the server.
        device: where the models run.
        fast: use weights of 8 or 16 bits.
        num_threads: number of CPU threads; None for PyTorch's default.
        api_key: key that clients must send; None without a single key.
        key_file: file with several keys.
        origins: origins of other sites whose scripts may send requests (CORS).
        hosts: host names that requests may have; None for all.
        has_page: whether there is a web page.
        root_path: path under which a proxy publishes the server.
        trusted_proxies: addresses of proxies whose X-Forwarded headers are used.
        certificate: files of the TLS certificate chain and its private key; None for HTTP.
        num_processes: number of processes that serve the same port. They divide the CPU threads.
        shared_directory: folder in which several processes share their metrics, the used limits of
            API keys and failed logins; None for a single process.
    """

    models: tuple[tuple[str, Path], ...]
    settings: ServeSettings
    device: str
    fast: bool = False
    num_threads: int | None = None
    api_key: str | None = None
    key_file: Path | None = None
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    has_page: bool = True
    root_path: str = ""
    trusted_proxies: tuple[str, ...] = ()
    certificate: tuple[Path, Path] | None = None
    num_processes: int = 1
    shared_directory: Path | None = None
