"""``bertsmith prepare`` beside ``tokenizers`` alone: speed, and the memory of all its processes.

The peer encodes the same sentences, already cut and in memory, on the same cores, and reads the
ids. ``prepare`` is the whole program: it starts, reads, cuts, tokenizes, writes. Usage:

    python benchmarks/prepare.py [--text FILE] [--small-only] [--json FILE]
"""

import argparse
import lzma
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from reporting import report
from tokenizers import Tokenizer as Engine

from bertsmith.data.store import Store
from bertsmith.text.corpus import find_sources, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece_trainer import train_wordpiece

SHARED = Path(__file__).parents[2] / "shared" / "data" / "text" / "en-wiki.jsonl.xz"
PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory(threading.Thread):
    """Watches the resident memory of a process and all below it, twenty times a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self._over = threading.Event()
        self.peak = 0

    def run(self) -> None:
        """Sum what /proc tells until the end."""
        while not self._over.wait(0.05):
            self.peak = max(self.peak, sum(map(self._resident, self._family())))

    def end(self) -> float:
        """Stop; return the peak in MB (10**6 bytes)."""
        self._over.set()
        self.join()
        return self.peak / 1e6

    def _family(self) -> list[int]:
        found = [self._process]
        for process in found:
            try:
                for task in Path(f"/proc/{process}/task").iterdir():
                    found += map(int, (task / "children").read_text().split())
            except OSError:
                continue
        return found

    @staticmethod
    def _resident(process: int) -> int:
        try:
            return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * PAGE
        except OSError:
            return 0


def run_prepare(text: list[Path], tokenizer: Path, out: Path) -> tuple[float, float]:
    """Run the program; return its seconds and the peak memory of all its processes in MB."""
    command = [sys.executable, "-m", "bertsmith", "prepare", *map(str, text)]
    command += ["--tokenizer", str(tokenizer), "--out", str(out)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    memory = Memory(process.pid)
    memory.start()
    status = process.wait()
    seconds = time.perf_counter() - began
    peak = memory.end()
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}")
    return seconds, peak


def run_peer(engine: Engine, sentences: list[str], fast: bool) -> tuple[float, int]:
    """Encode the sentences by ``tokenizers`` on all cores; return seconds and tokens."""
    encode = engine.encode_batch_fast if fast else engine.encode_batch
    began, tokens = time.perf_counter(), 0
    for first in range(0, len(sentences), 10_000):
        for found in encode(sentences[first : first + 10_000], add_special_tokens=False):
            tokens += len(found.ids)
    return time.perf_counter() - began, tokens


def unpacked(text: Path, folder: Path) -> Path:
    """Return the text as a plain file."""
    if text.suffix != ".xz":
        return text
    plain = folder / text.stem
    with lzma.open(text) as packed, plain.open("wb") as file:
        while block := packed.read(1 << 20):
            file.write(block)
    return plain


def measure(text: Path, folder: Path, *, small_only: bool) -> tuple[dict[str, float], ...]:
    """Alternate the two twice on the text; then once on ten times as much, for the memory."""
    documents = [document.text for document in read_documents(find_sources([str(text)]))]
    train_wordpiece(iter(documents[:5000]), 16_000).save(folder / "tokenizer")
    engine = Engine.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    sentences = [sentence for document in documents for sentence in split_sentences(document)]
    del documents
    ours, plain, fast, peaks = [], [], [], []
    for turn in range(2):
        seconds, tokens = run_peer(engine, sentences, fast=False)
        plain.append(seconds)
        fast.append(run_peer(engine, sentences, fast=True)[0])
        seconds, peak = run_prepare([text], folder / "tokenizer", folder / f"store{turn}")
        ours.append(seconds)
        peaks.append(peak)
    counts = Store.open(folder / "store0").manifest.splits.values()
    assert sum(count.tokens for count in counts) == tokens, "not the same ids"
    size = text.stat().st_size / 1e6
    ratios = {
        "prepare / tokenizers encode_batch": min(plain) / min(ours),
        "prepare / tokenizers encode_batch_fast": min(fast) / min(ours),
    }
    figures = {
        "text, MB": size,
        "tokens": tokens,
        "prepare: tokens/s": tokens / min(ours),
        "tokenizers encode_batch: tokens/s": tokens / min(plain),
        "tokenizers encode_batch_fast: tokens/s": tokens / min(fast),
        f"peak memory of all processes, {size:.0f} MB of text: MB": max(peaks),
    }
    if not small_only:
        seconds, peak = run_prepare([text] * 10, folder / "tokenizer", folder / "big")
        figures["ten times the text: tokens/s"] = 10 * tokens / seconds
        figures[f"peak memory of all processes, {10 * size:.0f} MB of text: MB"] = peak
    return ratios, figures


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=SHARED, help="JSON lines, may be packed by xz")
    parser.add_argument("--small-only", action="store_true", help="leave out ten times the text")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = unpacked(given.text, folder)
        ratios, figures = measure(text, folder, small_only=given.small_only)
    report("prepare", ratios, figures, given.json)


if __name__ == "__main__":
    main()
