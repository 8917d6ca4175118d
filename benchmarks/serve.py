"""Measure the throughput and latency of the server, compared with the library.

Three variants take turns, because the speed of the machine may vary:

- ``Embedder.encode`` embeds all texts offline.
- The library computes batches of texts of mixed lengths without HTTP. The server cannot sort texts
  by length either, so the speed of this variant is an upper bound for the server.
- A server process answers 64 clients over loopback. The clients run in this process and send one
  text per request.

The benchmark reports the throughput of each variant, the CPU time per text, request latencies, and
the largest difference between the vectors of the server and the library. With ``--cores 0
--client-cores 1``, the library and the server use the same core, and the clients another one.

    python benchmarks/serve.py --model DIR --texts FILE --clients 64 --seconds 60 --json OUT
"""

import argparse
import asyncio
import base64
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from reporting import report

from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.serve.settings import ServeSettings
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import VectorSettings

#: Number of rounds. In a round, the server is measured three times as long as each other variant.
NUM_ROUNDS = 6
REQUEST_HEAD = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


async def run_client(
    port: int,
    texts: list[str],
    first_request: int,
    end: float,
    responses: list[Any],
    encoding_format: str,
) -> None:
    """Send requests one after another over one connection until the time ``end``.

    Uses plain sockets, because HTTP client libraries need more CPU time than the server.
    """
    number = first_request
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        # A large prime spreads the texts of consecutive requests over the file.
        index = number * 7919 % len(texts)
        request = {"input": texts[index], "model": "m", "encoding_format": encoding_format}
        body = json.dumps(request).encode()
        start = time.perf_counter()
        writer.write(REQUEST_HEAD % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await reader.readexactly(length)
        # The head starts with "HTTP/1.1 " and the three digits of the status.
        status = int(head[9:12])
        responses.append((index, time.perf_counter() - start, status, content))
        number += 1
    writer.close()


async def run_clients(
    port: int,
    texts: list[str],
    num_clients: int,
    seconds: float,
    encoding_format: str = "base64",
) -> list[Any]:
    """Run the clients concurrently; return text index, seconds, status and content per request."""
    responses: list[Any] = []
    end = time.perf_counter() + seconds
    # Clients start at different texts.
    await asyncio.gather(
        *(
            run_client(port, texts, client * 31, end, responses, encoding_format)
            for client in range(num_clients)
        )
    )
    return responses


def measure_offline(embedder: Embedder, texts: list[str], seconds: float) -> float:
    """Return the texts per second of ``Embedder.encode``."""
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        embedder.encode(texts)
        count += len(texts)
    return count / (time.perf_counter() - start)


def measure_unsorted_batches(embedder: Embedder, texts: list[str], seconds: float) -> float:
    """Return the texts per second if the library computes batches as the server does."""
    settings = embedder.resolve_settings(VectorSettings())
    max_tokens = ServeSettings().max_batch_tokens
    generator = random.Random(0)
    cpu = torch.device("cpu")

    def compute(batch: list[list[int]]) -> Any:
        return embedder.encode_batch(batch, settings)

    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        batches: list[list[list[int]]] = [[]]
        sequences = list(embedder.tokenize(texts).sequences)
        for ids in generator.sample(sequences, len(sequences)):
            if sum(map(len, [*batches[-1], ids])) > max_tokens:
                batches.append([])
            batches[-1].append(ids)
        count += sum(len(batch) for batch, _ in map_in_threads(compute, batches, cpu))
    return count / (time.perf_counter() - start)


def read_cpu_seconds(process_id: int) -> float:
    """Return the CPU time of a process and its threads."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    # User and system time, the 14th and 15th fields of the file.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_ready(port: int) -> None:
    """Wait until the server responds."""
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/ready")
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return


def main() -> None:
    """Start the server, measure the three variants in turns, and report the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="file with one text per line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    cores = os.sched_getaffinity(0)
    parser.add_argument("--cores", nargs="+", type=int, default=cores)
    parser.add_argument("--client-cores", nargs="+", type=int, default=cores)
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)
    torch.set_num_threads(len(options.cores))
    texts = options.texts.read_text(encoding="utf-8").splitlines()
    embedder = Embedder.load(options.model)
    # Choose a free port.
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "bertsmith", "serve", f"m={options.model}", "--port", str(port),
         "--no-page", "--device", "cpu", "--threads", str(len(options.cores))],
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until_ready(port)
        # Warm up for three seconds.
        asyncio.run(run_clients(port, texts, options.clients, 3))
        responses: list[Any] = []
        rates: list[tuple[float, float, float]] = []
        offline_seconds: list[float] = []
        server_seconds: list[float] = []
        for _ in range(NUM_ROUNDS):
            round_seconds = options.seconds / NUM_ROUNDS
            os.sched_setaffinity(0, options.cores)
            cpu_start, start = time.process_time(), time.perf_counter()
            offline_rate = measure_offline(embedder, texts, round_seconds / 3)
            num_texts = offline_rate * (time.perf_counter() - start)
            offline_seconds.append((time.process_time() - cpu_start) / num_texts)
            unsorted_rate = measure_unsorted_batches(embedder, texts, round_seconds / 3)
            os.sched_setaffinity(0, options.client_cores)
            cpu_start, start = read_cpu_seconds(server.pid), time.perf_counter()
            new_responses = asyncio.run(run_clients(port, texts, options.clients, round_seconds))
            used_seconds = read_cpu_seconds(server.pid) - cpu_start
            server_seconds.append(used_seconds / max(len(new_responses), 1))
            server_rate = len(new_responses) / (time.perf_counter() - start)
            rates.append((offline_rate, unsorted_rate, server_rate))
            responses += new_responses
    finally:
        server.terminate()
        exit_status = server.wait(30)
    cpu_seconds = float(np.median(offline_seconds)), float(np.median(server_seconds))
    report_results(options, embedder, texts, responses, rates, cpu_seconds, exit_status)


def report_results(
    options: argparse.Namespace,
    embedder: Embedder,
    texts: list[str],
    responses: list[Any],
    rates: list[tuple[float, float, float]],
    cpu_seconds: tuple[float, float],
    exit_status: int,
) -> None:
    """Report throughput ratios, latencies, and the error of the server's vectors.

    Args:
        options: Command-line options.
        embedder: Computes the expected vectors.
        texts: All texts.
        responses: Text index, seconds, status and content of each request.
        rates: Texts per second of each round: offline, in unsorted batches, by the server.
        cpu_seconds: CPU seconds per text: offline, by the server.
        exit_status: Exit status of the server.
    """
    expected = embedder.encode(texts, normalize=True)
    max_difference = 0.0
    for index, _, status, content in responses:
        if status == 200:
            raw = base64.b64decode(json.loads(content)["data"][0]["embedding"])
            difference = float(abs(np.frombuffer(raw, "<f4") - expected[index]).max())
            max_difference = max(max_difference, difference)
    latencies = np.array([seconds for _, seconds, _, _ in responses])
    median_latency, p99_latency = float(np.median(latencies)), float(np.quantile(latencies, 0.99))
    offline, unsorted, server = (float(np.median(values)) for values in zip(*rates, strict=True))
    server_ratios = [server_rate / offline_rate for offline_rate, _, server_rate in rates]
    ratios = {
        "server / library": float(np.median(server_ratios)),
        "server / library, minimum": min(server_ratios),
        "server / library, maximum": max(server_ratios),
        "CPU time per text, library / server": cpu_seconds[0] / cpu_seconds[1],
        "library in unsorted batches / library": float(
            np.median([unsorted_rate / offline_rate for offline_rate, unsorted_rate, _ in rates])
        ),
        "p99 / median": p99_latency / median_latency,
    }
    measurements = {
        "clients": options.clients, "seconds": options.seconds, "requests": len(responses),
        "errors": sum(status != 200 for *_, status, _ in responses), "requests per second": server,
        "texts per second offline": offline, "texts per second in unsorted batches": unsorted,
        "CPU seconds per text offline": cpu_seconds[0],
        "CPU seconds per request of the server": cpu_seconds[1],
        "median seconds": median_latency, "p99 seconds": p99_latency,
        "largest difference": max_difference, "exit status": exit_status,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    report("serve", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
