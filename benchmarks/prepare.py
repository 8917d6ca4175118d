"""Compare the speed of ``bertsmith prepare`` with ``tokenizers``, and measure its memory.

The baseline encodes the same sentences on the same cores. The sentences are already split and in
memory. The time of ``prepare`` is that of the whole program, including start-up, reading the text,
splitting and tokenizing sentences, and writing the store.

    python benchmarks/prepare.py --text FILE [--small-only] [--json FILE]
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
from tokenizers import Tokenizer as HFTokenizer

from bertsmith.data.store import Store
from bertsmith.text.corpus import find_sources, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.wordpiece_trainer import train_wordpiece

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")


class MemoryMonitor(threading.Thread):
    """Measures the peak resident memory of a process and its descendants, 20 times per second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._stop_event = threading.Event()
        self.peak = 0

    def run(self) -> None:
        """Sample /proc until ``stop`` is called."""
        while not self._stop_event.wait(0.05):
            self.peak = max(self.peak, sum(map(self._resident_bytes, self._list_processes())))

    def stop(self) -> float:
        """Stop sampling and return the peak in MB (10**6 bytes)."""
        self._stop_event.set()
        self.join()
        return self.peak / 1e6

    def _list_processes(self) -> list[int]:
        """Return the ids of the process and its descendants."""
        pids = [self._pid]
        # The list grows during iteration, so that children of children are found, too.
        for pid in pids:
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
            except OSError:
                continue
        return pids

    @staticmethod
    def _resident_bytes(pid: int) -> int:
        """Return the resident memory of a process, 0 if it has ended."""
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_SIZE
        except OSError:
            return 0


def run_prepare(texts: list[Path], tokenizer: Path, out: Path) -> tuple[float, float]:
    """Run ``bertsmith prepare``; return its seconds and the peak memory of its processes in MB."""
    command = [sys.executable, "-m", "bertsmith", "prepare", *map(str, texts)]
    command += ["--tokenizer", str(tokenizer), "--out", str(out)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    monitor = MemoryMonitor(process.pid)
    monitor.start()
    status = process.wait()
    seconds = time.perf_counter() - start
    peak = monitor.stop()
    if status:
        raise SystemExit(f"the command failed with exit status {status}: {' '.join(command)}")
    return seconds, peak


def run_tokenizers(
    tokenizer: HFTokenizer, sentences: list[str], *, use_fast_method: bool
) -> tuple[float, int]:
    """Encode sentences with ``tokenizers`` on all cores; return seconds and token count."""
    encode = tokenizer.encode_batch_fast if use_fast_method else tokenizer.encode_batch
    num_tokens = 0
    start = time.perf_counter()
    for first in range(0, len(sentences), 10_000):
        for encoding in encode(sentences[first : first + 10_000], add_special_tokens=False):
            num_tokens += len(encoding.ids)
    return time.perf_counter() - start, num_tokens


def decompress_text(text: Path, directory: Path) -> Path:
    """Return the path of the uncompressed text; decompress it into ``directory`` if necessary."""
    if text.suffix != ".xz":
        return text
    plain = directory / text.stem
    with lzma.open(text) as compressed, plain.open("wb") as file:
        while block := compressed.read(1 << 20):
            file.write(block)
    return plain


def compare_with_tokenizers(
    text: Path, directory: Path, *, small_only: bool
) -> tuple[dict[str, float], ...]:
    """Run ``tokenizers`` and ``prepare`` twice in turns, then ``prepare`` on ten times the text.

    Args:
        text: The text.
        directory: A directory for the tokenizer and the stores.
        small_only: Whether to skip ten times the text.

    Returns:
        Speed ratios and measurements.
    """
    documents = [document.text for document in read_documents(find_sources([str(text)]))]
    train_wordpiece(iter(documents[:5000]), 16_000).save(directory / "tokenizer")
    tokenizer = HFTokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    sentences = [sentence for document in documents for sentence in split_sentences(document)]
    # Free memory before the measurements.
    del documents
    prepare_seconds = []
    plain_seconds = []
    fast_seconds = []
    peaks = []
    for run in range(2):
        seconds, num_tokens = run_tokenizers(tokenizer, sentences, use_fast_method=False)
        plain_seconds.append(seconds)
        fast_seconds.append(run_tokenizers(tokenizer, sentences, use_fast_method=True)[0])
        seconds, peak = run_prepare([text], directory / "tokenizer", directory / f"store{run}")
        prepare_seconds.append(seconds)
        peaks.append(peak)
    counts = Store.open(directory / "store0").manifest.splits.values()
    assert sum(count.tokens for count in counts) == num_tokens, "the numbers of tokens differ"
    size = text.stat().st_size / 1e6
    ratios = {
        "prepare / tokenizers encode_batch": min(plain_seconds) / min(prepare_seconds),
        "prepare / tokenizers encode_batch_fast": min(fast_seconds) / min(prepare_seconds),
    }
    measurements = {
        "text, MB": size,
        "tokens": num_tokens,
        "prepare: tokens/s": num_tokens / min(prepare_seconds),
        "tokenizers encode_batch: tokens/s": num_tokens / min(plain_seconds),
        "tokenizers encode_batch_fast: tokens/s": num_tokens / min(fast_seconds),
        f"peak memory of all processes, {size:.0f} MB of text: MB": max(peaks),
    }
    if not small_only:
        seconds, peak = run_prepare([text] * 10, directory / "tokenizer", directory / "big")
        measurements["ten times the text: tokens/s"] = 10 * num_tokens / seconds
        measurements[f"peak memory of all processes, {10 * size:.0f} MB of text: MB"] = peak
    return ratios, measurements


def main() -> None:
    """Run the comparison and report its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--text",
        type=Path,
        required=True,
        help="JSON lines, optionally xz-compressed, such as the output of `bertsmith corpus "
        "docstrings --out corpus.jsonl`",
    )
    parser.add_argument("--small-only", action="store_true", help="skip ten times the text")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory_name:
        directory = Path(directory_name)
        text = decompress_text(options.text, directory)
        ratios, measurements = compare_with_tokenizers(
            text, directory, small_only=options.small_only
        )
    report("prepare", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
