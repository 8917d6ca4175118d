"""Measure a server under overload, with slow readers, many requests and malformed bodies.

Each part starts a server process. Clients run in this process and use different loopback addresses,
so that the server treats them as different clients.

- ``overload``: large requests at 1x, 2x and 10x the rate that the server can answer. Reports the
  share of the maximum rate that is answered, and the latency of one-word requests of another
  client.
- ``readers``: clients request large answers and do not read them. Reports the peak memory.
- ``requests``: many requests with one text. Reports the memory after a tenth and after all.
- ``malformed``: a body of 4 MB that is not valid. Reports its time and the peak memory.

With ``--server-cores 0 --client-cores 1`` the server and the clients use different cores.

    python benchmarks/serve_overload.py --model DIR --seconds 60 --json OUT
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from reporting import report

PARTS = ("overload", "readers", "requests", "malformed")
#: Number of clients of the overload, each with an address of its own.
NUM_CLIENTS = 8
#: One-word requests per second next to the overload.
WORDS_PER_SECOND = 5.0
HEAD = (
    "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    "Content-Length: {length}\r\nConnection: close\r\n\r\n"
)


class Server:
    """A server process.

    Attributes:
        port: port that it listens on.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", port: int) -> None:
        self.port = port
        self._process = process

    def read_memory(self, field: str = "VmRSS") -> float:
        """Return the memory in MiB: "VmRSS" for the current, "VmHWM" for the peak."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) / 1024

    def reset_peak_memory(self) -> None:
        """Let "VmHWM" start at the current memory."""
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")


@contextmanager
def run_server(options: argparse.Namespace) -> Iterator[Server]:
    """Start a server of ``options.model`` on ``options.server_cores``; wait until it is ready."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertsmith", "serve", f"m={options.model}", "--port", str(port),
         "--no-page", "--set", "serve.drain_seconds=0"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(len(options.server_cores))},
    )  # fmt: skip
    os.sched_setaffinity(process.pid, options.server_cores)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.2)
        yield Server(process, port)
    finally:
        process.terminate()
        process.wait(60)


async def send(port: int, path: str, body: bytes, client: int = 0) -> tuple[int, float]:
    """Send a request from an address of a client; return status and seconds."""
    start = time.perf_counter()
    local_address = (f"127.0.0.{client + 1}", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local_address)
    try:
        writer.write(HEAD.format(path=path, length=len(body)).encode() + body)
        await writer.drain()
        # The response starts with "HTTP/1.1 " and the three digits of the status.
        status = int((await reader.readexactly(12))[9:])
        while await reader.read(2**16):
            pass
    finally:
        writer.close()
    return status, time.perf_counter() - start


def make_body(num_texts: int, num_words: int = 100) -> bytes:
    """Return a request for the vectors of texts."""
    return json.dumps({"inputs": [" ".join(["word"] * num_words)] * num_texts}).encode()


async def send_at_rate(
    port: int, body: bytes, rate: float, seconds: float, first_client: int, num_clients: int
) -> list[tuple[int, float]]:
    """Send requests at a constant rate, whether or not earlier ones have been answered."""
    tasks = []
    start = time.perf_counter()
    for number in range(max(round(rate * seconds), 1)):
        await asyncio.sleep(start + number / rate - time.perf_counter())
        client = first_client + number % num_clients
        tasks.append(asyncio.create_task(send(port, "/embed", body, client)))
    return await asyncio.gather(*tasks)


async def measure_maximum(port: int, body: bytes, seconds: float) -> float:
    """Return the requests per second that the server answers if each client waits for answers."""
    end = time.perf_counter() + seconds
    count = 0

    async def run_client(client: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            status, _ = await send(port, "/embed", body, client)
            count += status == 200

    start = time.perf_counter()
    await asyncio.gather(*(run_client(client) for client in range(NUM_CLIENTS)))
    return count / (time.perf_counter() - start)


async def measure_load(
    port: int, body: bytes, rate: float, seconds: float
) -> tuple[float, int, float]:
    """Return answered requests per second, rejections, and the p99 seconds of one-word requests."""
    start = time.perf_counter()
    words: Coroutine[Any, Any, list[tuple[int, float]]] = send_at_rate(
        port, make_body(1, 1), WORDS_PER_SECOND, seconds, NUM_CLIENTS, 1
    )
    answers, word_answers = await asyncio.gather(
        send_at_rate(port, body, rate, seconds, 0, NUM_CLIENTS), words
    )
    num_answered = sum(status == 200 for status, _ in answers)
    goodput = num_answered / (time.perf_counter() - start)
    # A rejected one-word request counts as infinitely slow.
    waits = [wait if status == 200 else float("inf") for status, wait in word_answers]
    return goodput, sum(status == 429 for status, _ in answers), float(np.quantile(waits, 0.99))


def run_overload(options: argparse.Namespace, ratios: Any, figures: Any) -> None:
    """Measure the goodput at multiples of the maximum rate."""
    body = make_body(options.texts_per_request)
    with run_server(options) as server:
        asyncio.run(measure_maximum(server.port, body, min(options.seconds, 5.0)))
        maximum = asyncio.run(measure_maximum(server.port, body, options.seconds))
        figures["maximum requests per second"] = maximum
        for factor in options.factors:
            goodput, num_rejected, p99 = asyncio.run(
                measure_load(server.port, body, factor * maximum, options.seconds)
            )
            ratios[f"goodput at {factor}x / maximum"] = goodput / maximum
            figures[f"rejected at {factor}x"] = num_rejected
            figures[f"p99 seconds of one word at {factor}x"] = p99


async def start_readers(port: int, body: bytes, num_readers: int, seconds: float) -> int:
    """Let clients request answers without reading them; return the number of started answers.

    A client whose request is rejected tries again. The connections stay open for ``seconds``.
    """
    end = time.perf_counter() + seconds
    request = HEAD.format(path="/embed_all", length=len(body)).encode() + body

    async def run_reader(client: int) -> bool:
        while time.perf_counter() < end:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            connection.bind((f"127.0.0.{client % NUM_CLIENTS + 1}", 0))
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
            # The stream stops reading from the socket when it has 8 KiB.
            reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
            writer.write(request)
            is_answered = (await reader.readexactly(12))[9:] == b"200"
            if is_answered:
                await asyncio.sleep(end - time.perf_counter())
            writer.close()
            if is_answered:
                return True
            await asyncio.sleep(1)
        return False

    return sum(await asyncio.gather(*(run_reader(client) for client in range(num_readers))))


def run_readers(options: argparse.Namespace, ratios: Any, figures: Any) -> None:
    """Measure the peak memory with clients that do not read their answers.

    The idle memory is measured after a single text, and again after one of the large answers has
    been read. The second value includes what a server keeps after its first large batches.
    """
    body = make_body(options.reader_texts, 60)
    with run_server(options) as server:
        asyncio.run(send(server.port, "/embed_all", make_body(1)))
        idle = server.read_memory()
        asyncio.run(send(server.port, "/embed_all", body))
        warm_idle = server.read_memory()
        server.reset_peak_memory()
        figures["slow readers"] = asyncio.run(
            start_readers(server.port, body, options.readers, options.seconds)
        )
        peak = server.read_memory("VmHWM")
        ratios["peak memory with slow readers / idle"] = peak / idle
        ratios["peak memory with slow readers / idle after an answer"] = peak / warm_idle
        figures["idle MiB"] = idle
        figures["idle MiB after an answer"] = warm_idle


def run_requests(options: argparse.Namespace, ratios: Any, figures: Any) -> None:
    """Measure the memory after a tenth of many requests and after all of them."""

    async def send_all(port: int, count: int) -> None:
        numbers = iter(range(count))

        async def run_client(client: int) -> None:
            for number in numbers:
                await send(port, "/embed", make_body(1, 1 + number % 60), client)

        await asyncio.gather(*(run_client(client) for client in range(NUM_CLIENTS)))

    with run_server(options) as server:
        asyncio.run(send_all(server.port, max(options.requests // 10, 1)))
        first = server.read_memory()
        asyncio.run(send_all(server.port, options.requests - options.requests // 10))
        last = server.read_memory()
    ratios["memory after all requests / after a tenth"] = last / first
    figures["requests"] = options.requests
    figures["MiB after all requests"] = last


def run_malformed(options: argparse.Namespace, _: Any, figures: Any) -> None:
    """Measure the time and memory of a large body with a wrong type in each item."""
    body = b'{"inputs": [' + b",".join([b"[[1]]"] * 650_000) + b"]}"
    with run_server(options) as server:
        asyncio.run(send(server.port, "/embed", make_body(1)))
        server.reset_peak_memory()
        idle = server.read_memory()
        status, seconds = asyncio.run(send(server.port, "/embed", body))
        figures["status of a malformed body"] = status
        figures["seconds of a malformed body"] = seconds
        figures["MiB of a malformed body"] = server.read_memory("VmHWM") - idle


def main() -> None:
    """Run the selected parts and report their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factors", nargs="+", type=int, default=(1, 2, 10))
    cores = os.sched_getaffinity(0)
    parser.add_argument("--server-cores", nargs="+", type=int, default=cores)
    parser.add_argument("--client-cores", nargs="+", type=int, default=cores)
    parser.add_argument("--texts-per-request", type=int, default=64)
    parser.add_argument("--readers", type=int, default=80)
    parser.add_argument("--reader-texts", type=int, default=80, help="texts of each slow reader")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.sched_setaffinity(0, options.client_cores)
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    runs = dict(zip(PARTS, (run_overload, run_readers, run_requests, run_malformed), strict=True))
    for part in options.parts:
        runs[part](options, ratios, figures)
    report("serve_overload", ratios, figures, options.json)


if __name__ == "__main__":
    main()
