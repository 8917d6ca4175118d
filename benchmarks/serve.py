"""The server under load beside the library: 64 clients of one sentence each, on the loopback.

In turns, since machines are now quicker and now slower: ``Embedder.encode`` embeds the texts
offline; the library computes batches of whatever length comes, as the server must, without HTTP,
which is what the server could reach at the most; and a server in a process of its own is asked by
clients of a third process. Told are the throughput of each, each request's time, and whether
vectors agree.

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
from bertsmith.serve.models import embed_sequences
from bertsmith.serve.settings import ServeSettings
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import VectorSettings

#: Turns of each, which share the seconds: those of the library are a third as long.
TURNS = 6
HEAD = (
    b"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


async def one(port: int, texts: list[str], number: int, until: float, found: list[Any]) -> None:
    """Ask for one text after another, from ``number`` on, over one connection.

    Written on bare sockets: a client library takes more of the two cores than the server does.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        text = number * 7919 % len(texts)
        asked = {"input": texts[text], "model": "m", "encoding_format": "base64"}
        body = json.dumps(asked).encode()
        began = time.perf_counter()
        writer.write(HEAD % len(body) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        content = await reader.readexactly(length)
        found.append((text, time.perf_counter() - began, int(head[9:12]), content))
        number += 1
    writer.close()


async def load(port: int, texts: list[str], clients: int, seconds: float) -> list[Any]:
    """Return (text, seconds, status, content) of each request."""
    found: list[Any] = []
    until = time.perf_counter() + seconds
    await asyncio.gather(*(one(port, texts, own * 31, until, found) for own in range(clients)))
    return found


def offline(embedder: Embedder, texts: list[str], seconds: float) -> float:
    """Return texts a second."""
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        embedder.encode(texts)
        count += len(texts)
    return count / (time.perf_counter() - began)


def packed(embedder: Embedder, texts: list[str], seconds: float) -> float:
    """Return texts a second in batches of a server's size, of texts as they come."""
    recipe, most = embedder.resolve_settings(VectorSettings()), ServeSettings().batch_tokens
    chance, cpu = random.Random(0), torch.device("cpu")

    def compute(batch: list[list[int]]) -> Any:
        with torch.inference_mode():
            return embed_sequences(embedder, recipe, batch)

    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        batches: list[list[list[int]]] = [[]]
        sequences = list(embedder.tokenize(texts).sequences)
        for ids in chance.sample(sequences, len(sequences)):
            if batches[-1] and sum(map(len, batches[-1])) + len(ids) > most:
                batches.append([])
            batches[-1].append(ids)
        count += sum(len(batch) for batch, _ in map_in_threads(compute, batches, cpu))
    return count / (time.perf_counter() - began)


def main() -> None:
    """Measure, and tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a text a line")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    texts = options.texts.read_text(encoding="utf-8").splitlines()
    embedder = Embedder.load(options.model)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = subprocess.Popen(
        [sys.executable, "-m", "bertsmith", "serve", f"m={options.model}", "--port", str(port),
         "--no-page"], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/ready")
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        asyncio.run(load(port, texts, options.clients, 3))
        found: list[Any] = []
        rates: list[tuple[float, float, float]] = []
        for _ in range(TURNS):
            share = options.seconds / TURNS
            alone = offline(embedder, texts, share / 3)
            any_length = packed(embedder, texts, share / 3)
            began = time.perf_counter()
            own_found = asyncio.run(load(port, texts, options.clients, share))
            rates.append((alone, any_length, len(own_found) / (time.perf_counter() - began)))
            found += own_found
    finally:
        own.terminate()
        ended = own.wait(30)
    told(options, embedder, texts, found, rates, ended)


def told(
    options: argparse.Namespace, embedder: Embedder, texts: list[str], found: list[Any],
    rates: list[tuple[float, float, float]], ended: int,
) -> None:  # fmt: skip
    """Tell what was measured. rates: of each turn, offline, in batches of any lengths, online."""
    wanted = embedder.encode(texts)
    furthest = 0.0
    for text, _, status, content in found:
        if status == 200:
            raw = base64.b64decode(json.loads(content)["data"][0]["embedding"])
            furthest = max(furthest, float(abs(np.frombuffer(raw, "<f4") - wanted[text]).max()))
    times = np.array([seconds for _, seconds, _, _ in found])
    middle, late = float(np.median(times)), float(np.quantile(times, 0.99))
    alone, unsorted, online = (float(np.median(rate)) for rate in zip(*rates, strict=True))
    each = [server / library for library, _, server in rates]
    ratios = {
        "server / library": float(np.median(each)),
        "server / library, least": min(each), "server / library, most": max(each),
        "library in batches of any lengths / library": float(
            np.median([own / library for library, own, _ in rates])
        ),
        "p99 / median": late / middle,
    }  # fmt: skip
    figures = {
        "clients": options.clients, "seconds": options.seconds, "requests": len(found),
        "errors": sum(status != 200 for *_, status, _ in found), "requests a second": online,
        "texts a second offline": alone, "texts a second in batches of any lengths": unsorted,
        "median seconds": middle, "p99 seconds": late, "largest difference": furthest,
        "exit status": ended, "load": os.getloadavg()[0],
    }  # fmt: skip
    report("serve", ratios, figures, options.json)


if __name__ == "__main__":
    main()
