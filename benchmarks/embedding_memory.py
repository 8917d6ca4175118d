"""Measure the peak memory of training with large batches, and of mining in a large index.

``batch`` trains an embedding model with random weights for one step of multiple negatives ranking
on pairs of random words, with gradient caching. ``index`` embeds random lines to an index, and
``mine`` mines hard negatives in this index. Each part runs in a process of its own. An interrupted
``index`` is continued by the same command.

    python benchmarks/embedding_memory.py batch --size mini --batch-size 8192
    python benchmarks/embedding_memory.py index --folder mining --lines 1000000
    python benchmarks/embedding_memory.py mine --folder mining --lines 1000000 --queries 10000
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from reporting import report

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import SIZES, ModelConfig, get_size_preset
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.mine_negatives import mine_negatives
from bertsmith.use.mining_settings import MiningSettings
from bertsmith.use.vector_settings import VectorSettings

VOCAB_SIZE = 30_522
WORDS = [f"w{number}" for number in range(VOCAB_SIZE - len(SPECIAL_TOKENS))]
LINES_FILE, INDEX_FILE, MODEL_DIR = "lines.txt", "lines.index", "model"
PAIRS_FILE, NEGATIVES_FILE = "pairs.tsv", "negatives.jsonl"


def save_model(directory: Path, size: str) -> Path:
    """Write a model with random weights, unless it exists."""
    if not directory.exists():
        torch.manual_seed(0)
        values = {"vocab_size": VOCAB_SIZE, **get_size_preset(size)}
        config = ModelConfig.parse(values, "the size")
        tokenizer = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))
        bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


def iter_texts(count: int, num_words: int, seed: int) -> Iterator[str]:
    """Yield texts of random words."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=num_words))


def write_pairs(path: Path, count: int, num_words: int) -> Path:
    """Write a table of pairs of texts."""
    pairs = zip(iter_texts(count, num_words, 1), iter_texts(count, num_words, 2), strict=True)
    with path.open("w", encoding="utf-8") as file:
        file.write("anchor\tpositive\n")
        file.writelines(f"{anchor}\t{positive}\n" for anchor, positive in pairs)
    return path


def train_batch(options: argparse.Namespace) -> dict[str, float]:
    """Train for one step with all pairs in a batch; return the sizes of the batch."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        # One pair is held out, so that the evaluation has no part in the peak.
        table = write_pairs(folder / PAIRS_FILE, options.batch_size + 1, options.words)
        values = {
            "embedding": {
                "batch_size": options.batch_size,
                "max_validation_examples": 1,
            },
            "schedule": {"steps": 1},
            "run": {"device": "cpu", "precision": options.precision},
        }
        model = save_model(folder / MODEL_DIR, options.size)
        finetune_embedder(model, folder / "run", data=table, values=values)
    return {"pairs": options.batch_size, "words per text": options.words}


def build_index(options: argparse.Namespace) -> dict[str, float]:
    """Embed lines to an index, or continue to do so; return its size."""
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model = save_model(folder / MODEL_DIR, options.size)
    summary = embed_lines(
        Embedder.load(model),
        iter_texts(options.lines, options.words, 0),
        folder / INDEX_FILE,
        VectorSettings(),
    )
    return {"lines": summary.num_lines, "dimensions": summary.width}


def mine(options: argparse.Namespace) -> dict[str, float]:
    """Mine negatives for random queries in the index; return the number of negatives."""
    folder = options.folder
    table = write_pairs(folder / PAIRS_FILE, options.queries, options.words)
    out = folder / NEGATIVES_FILE
    out.unlink(missing_ok=True)
    # The similarities of random texts mean nothing, so there is no margin.
    settings = MiningSettings(relative_margin=None)
    counts = mine_negatives(folder / INDEX_FILE, table, out, settings=settings)
    return {"queries": counts.num_pairs, "negatives": counts.num_negatives}


PARTS = {"batch": train_batch, "index": build_index, "mine": mine}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; None for those of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--words", type=int, default=6, help="words of a text")
    parser.add_argument("--batch-size", type=int, default=8192, help="batch: pairs in the batch")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of batch")
    parser.add_argument("--folder", type=Path, default=Path("mining"), help="index and mine: files")
    parser.add_argument("--lines", type=int, default=1_000_000, help="index: number of lines")
    parser.add_argument("--queries", type=int, default=10_000, help="mine: number of queries")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a part, and report the peak memory of this process and the time."""
    options = parse_options(arguments)
    start = time.perf_counter()
    figures = PARTS[options.part](options)
    # In KiB on Linux. Includes pages of memory-mapped files.
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    figures |= {"seconds": time.perf_counter() - start, "peak memory, GiB": peak_gib}
    report("embedding-memory", {}, figures, options.json)


if __name__ == "__main__":
    main()
