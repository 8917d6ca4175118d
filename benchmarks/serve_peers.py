"""Compare the server with sentence-transformers behind a minimal FastAPI server.

Both servers load the same model and answer in turns, each with all cores. The clients run in this
process, wait for the answer to a request before they send the next one, and send one text each.

    python benchmarks/serve_peers.py --model DIR --texts FILE --clients 64 --seconds 60 --json OUT
"""

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from reporting import report
from sentence_transformers import SentenceTransformer
from serve import read_cpu_seconds, run_clients, wait_until_ready

NUM_ROUNDS = 3


def create_minimal_app(model: Path) -> FastAPI:
    """Return a server as in the tutorials: each request calls ``encode`` in a thread."""
    app = FastAPI()
    encoder = SentenceTransformer(str(model), device="cpu")

    @app.get("/ready")
    def ready() -> str:
        return "ready"

    @app.post("/v1/embeddings")
    def embed(body: dict[str, Any]) -> dict[str, Any]:
        vectors = encoder.encode([body["input"]], normalize_embeddings=True)
        return {"data": [{"embedding": vector.tolist()} for vector in vectors]}

    return app


def find_free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port: int = free_socket.getsockname()[1]
    return port


def start_server(name: str, model: Path, port: int) -> "subprocess.Popen[bytes]":
    """Start a server process."""
    command = ["-m", "bertsmith", "serve", f"m={model}", "--no-page", "--device", "cpu"]
    command += ["--port", str(port)]
    if name == "FastAPI":
        command = [__file__, "--model", str(model), "--port", str(port)]
    return subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL)


def compare_vectors(one: list[Any], other: list[Any]) -> float:
    """Return the lowest cosine of the vectors of the same text by both servers."""
    first = {index: content for index, _, _, content in one}
    cosines = []
    for index, _, _, content in other:
        if index in first:
            vectors = [
                np.array(json.loads(text)["data"][0]["embedding"])
                for text in (first[index], content)
            ]
            vectors = [vector / np.linalg.norm(vector) for vector in vectors]
            cosines.append(float(vectors[0] @ vectors[1]))
    return min(cosines)


def measure(options: argparse.Namespace) -> None:
    """Measure the servers in turns and report their throughput and latency."""
    texts = options.texts.read_text(encoding="utf-8").splitlines()
    ports = {name: find_free_port() for name in ("bertsmith", "FastAPI")}
    responses: dict[str, list[Any]] = {name: [] for name in ports}
    rates: dict[str, list[float]] = {name: [] for name in ports}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    cpu_seconds: dict[str, float] = dict.fromkeys(ports, 0.0)
    with ExitStack() as stack:
        for name, port in ports.items():
            process = processes[name] = start_server(name, options.model, port)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            wait_until_ready(port)
            asyncio.run(run_clients(port, texts, options.clients, 3, "float"))
        for _ in range(NUM_ROUNDS):
            for name, port in ports.items():
                start = time.perf_counter()
                cpu_seconds[name] -= read_cpu_seconds(processes[name].pid)
                seconds = options.seconds / NUM_ROUNDS / len(ports)
                answers = asyncio.run(run_clients(port, texts, options.clients, seconds, "float"))
                cpu_seconds[name] += read_cpu_seconds(processes[name].pid)
                rates[name].append(len(answers) / (time.perf_counter() - start))
                responses[name] += answers
    figures: dict[str, Any] = {"clients": options.clients}
    for name, answers in responses.items():
        latencies = [seconds for _, seconds, _, _ in answers]
        figures[f"{name}: requests per second"] = float(np.median(rates[name]))
        figures[f"{name}: median seconds"] = float(np.median(latencies))
        figures[f"{name}: p99 seconds"] = float(np.quantile(latencies, 0.99))
        figures[f"{name}: CPU seconds per request"] = cpu_seconds[name] / len(answers)
        figures[f"{name}: errors"] = sum(status != 200 for *_, status, _ in answers)
    figures["lowest cosine"] = compare_vectors(responses["bertsmith"], responses["FastAPI"])
    pairs = zip(rates["bertsmith"], rates["FastAPI"], strict=True)
    ratios = {"bertsmith / FastAPI": float(np.median([one / other for one, other in pairs]))}
    report("serve_peers", ratios, figures, options.json)


def main() -> None:
    """Measure, or run the minimal server with ``--port``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, help="file with one text per line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--port", type=int, help="run the minimal server on this port")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.port is None:
        measure(options)
    else:
        app = create_minimal_app(options.model)
        uvicorn.run(app, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
