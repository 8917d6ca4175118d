"""Vectors of sentences beside sentence-transformers, and in 8 bits beside onnxruntime.

All load the same directory and get the same lines of a file, of 5 to 250 tokens. They take turns
over all of them in one process, tokenizing included: ours in float32 and its fast mode,
sentence-transformers at its defaults, and onnxruntime with weights in 8 bits and batches sorted by
length, at the batch size that is fastest on a sample. Three graphs stand for onnxruntime: our own
export, and the one that PyTorch exports of transformers' model, fused by onnxruntime's own
optimizer before it is quantized, wholly or save the Linears that cost the most precision; the
fastest one is the peer, whatever its precision. With --layers, a random model of base
size shows what the lowest layer costs beside the last. Usage:

    python benchmarks/embed.py --model DIR --texts FILE [--count 2000] [--layers] [--json FILE]
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnx import TensorProto
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers import optimizer
from reporting import report
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from bertsmith.bundle import EncoderBundle
from bertsmith.interop.onnx import write_onnx
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig, size_preset
from bertsmith.runtime import device
from bertsmith.use.embed import Embedder

Floats = NDArray[np.float32]
Encode = Callable[[list[str]], Floats]

#: Tokens of a text, [CLS] and [SEP] counted.
SHORTEST, LONGEST = 5, 250
#: Batch sizes that onnxruntime may choose from.
SIZES = (8, 16, 32, 64)
TURNS = 5
#: The goals of the project: float32, 8 bits, the lowest layer of twelve; and the least cosine.
GOALS = {"float32": 2.0, "fast": 1.0, "layers": 5.0}
NAMES = ["input_ids", "attention_mask", "token_type_ids"]


def texts_of(path: Path, count: int, embedder: Embedder) -> list[str]:
    """Return the first lines of a file that are neither too short nor too long.

    A line that names a special token is left out: transformers reads it as that token, we as text.
    """
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    with path.open(encoding="utf-8") as file:
        lines = (line.strip() for line in file)
        fitting = (
            line for line in lines
            if not any(one in line for one in special)
            and SHORTEST <= len(embedder.tokenizer.encode(line)) + 2 <= LONGEST
        )  # fmt: skip
        found = list(islice(fitting, count))
    if len(found) < count:
        raise SystemExit(f"{path}: {len(found):,} lines of {SHORTEST} to {LONGEST} tokens")
    return found


class Onnx:
    """A graph of onnxruntime that makes vectors: sorted by length, mean of tokens, length 1."""

    def __init__(self, path: Path, embedder: Embedder) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.embedder, self.size = embedder, 32
        self.inputs = {one.name for one in self.session.get_inputs()}

    def __call__(self, texts: list[str]) -> Floats:
        """Return float32 [n, D]."""
        sequences = self.embedder.tokenize(texts).sequences
        order = sorted(range(len(texts)), key=lambda number: -len(sequences[number]))
        found = np.empty((len(texts), self.embedder.config.width), np.float32)
        for first in range(0, len(order), self.size):
            numbers = order[first : first + self.size]
            found[numbers] = self._batch([sequences[number] for number in numbers])
        return found

    def _batch(self, sequences: list[list[int]]) -> Floats:
        ids = np.zeros((len(sequences), len(sequences[0])), np.int64)
        mask = np.zeros_like(ids)
        for row, own in enumerate(sequences):
            ids[row, : len(own)], mask[row, : len(own)] = own, 1
        given = dict(zip(NAMES, (ids, mask, np.zeros_like(ids)), strict=True))
        (hidden, *_) = self.session.run(
            None, {name: value for name, value in given.items() if name in self.inputs}
        )
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors: Floats = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return vectors

    def choose(self, sample: list[str]) -> None:
        """Take the batch size that is fastest on a sample."""
        seconds = {}
        for self.size in SIZES:
            self(sample[:64])
            began = time.perf_counter()
            self(sample)
            seconds[self.size] = time.perf_counter() - began
        self.size = min(seconds, key=seconds.__getitem__)


def ours_in_8_bits(model: Path, folder: Path) -> Path:
    """Return our own export."""
    write_onnx(model, folder / "ours", int8=True)
    return folder / "ours" / "model_quantized.onnx"


def fused_in_8_bits(model: Path, folder: Path, embedder: Embedder) -> dict[str, Path]:
    """Return transformers' model as PyTorch exports it, fused by onnxruntime, then quantized.

    Once wholly, and once with the Linears in float32 that our own export leaves so, too.
    """
    theirs = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        """The model with inputs in their order, and one output."""

        def __init__(self) -> None:
            super().__init__()
            self.model = theirs

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> Any:
            return self.model(
                input_ids=ids, attention_mask=mask, token_type_ids=kinds
            ).last_hidden_state

    ids = torch.ones(2, 9, dtype=torch.int64)
    plain, fused = folder / "plain.onnx", folder / "fused.onnx"
    with warnings.catch_warnings():
        # The older exporter: its graphs are those that the optimizer knows.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden(), (ids, ids, ids * 0), str(plain), input_names=NAMES, output_names=["hidden"],
            dynamic_axes={name: {0: "B", 1: "S"} for name in [*NAMES, "hidden"]},
            opset_version=17, dynamo=False,
        )  # fmt: skip
    config = embedder.config
    whole = optimizer.optimize_model(
        str(plain), model_type="bert", num_heads=config.heads, hidden_size=config.width,
        opt_level=0, use_gpu=False,
    )  # fmt: skip
    count = whole.get_fused_operator_statistics()["Attention"]
    if count != config.layers:
        raise SystemExit(f"onnxruntime's optimizer fused {count} of {config.layers} attentions")
    whole.save_model_to_file(str(fused))
    # What takes the feed-forward network's activation costs most of the precision in 8 bits.
    down = [
        node.name for node in whole.model.graph.node
        if node.op_type == "MatMul" and "/output/dense/" in node.name
        and "/attention/" not in node.name
    ]  # fmt: skip
    assert len(down) == config.layers
    written = {}
    for name, kept in (("fused, all in 8 bits", []), ("fused, part in float32", down)):
        written[name] = folder / f"{len(kept)}.onnx"
        # The types as onnxruntime's own tool for such graphs has them, which cannot tell those of
        # fused outputs; a scale an output and 7 bits, else processors without VNNI overflow.
        quantize_dynamic(fused, written[name], weight_type=QuantType.QInt8, per_channel=True,
                         reduce_range=True, nodes_to_exclude=kept,
                         extra_options={"DefaultTensorType": TensorProto.FLOAT})  # fmt: skip
    return written


def turns_of(contestants: dict[str, Encode], texts: list[str]) -> dict[str, list[float]]:
    """Return the seconds of each in each turn; who begins changes from turn to turn."""
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(TURNS):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            began = time.perf_counter()
            contestants[name](texts)
            seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(seconds: dict[str, list[float]], theirs: str, ours: str) -> float:
    """Return the median over the turns of their seconds by ours."""
    pairs = zip(seconds[theirs], seconds[ours], strict=True)
    return median(their / own for their, own in pairs)


def cosines(name: str, found: Floats, wanted: Floats) -> Iterator[tuple[str, float]]:
    """Yield the least cosine of two sets of vectors, the first percentile and the median."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    values = (found.astype(np.float64) * wanted).sum(1) / lengths
    yield f"least cosine to float32, {name}", float(values.min())
    yield f"first percentile, {name}", float(np.percentile(values, 1))
    yield f"median, {name}", float(np.median(values))


def layers(texts: list[str], embedder: Embedder, folder: Path) -> dict[str, list[float]]:
    """Return the seconds of the last layer and of the lowest one of a random model, base size."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=embedder.tokenizer.vocab_size, **size_preset("base"))
    base = Embedder(EncoderBundle(BertModel(config).eval(), embedder.tokenizer, config, folder))
    for layer in (-1, -12):
        base.encode(texts[:8], layer=layer)
    chosen: dict[str, Encode] = {
        str(layer): lambda given, layer=layer: base.encode(given, layer=layer)  # type: ignore[misc]
        for layer in (-1, -12)
    }
    return turns_of(chosen, texts)


def compared(
    options: argparse.Namespace, folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Measure everything; return ratios and figures."""
    embedder = Embedder.load(options.model)
    texts = texts_of(options.texts, options.count, embedder)
    peer = SentenceTransformer(str(options.model), device="cpu")
    files = {
        "our graph": ours_in_8_bits(options.model, folder),
        **fused_in_8_bits(options.model, folder, embedder),
    }
    graphs = {f"onnxruntime, {name}": Onnx(path, embedder) for name, path in files.items()}
    for graph in graphs.values():
        graph.choose(texts[:: max(len(texts) // 300, 1)])
    contestants: dict[str, Encode] = {
        "float32": embedder.encode,
        "fast": Embedder.load(options.model, fast=True).encode,
        "sentence-transformers": peer.encode,
        **graphs,
    }
    # Before the clock runs: everything is warm, and whoever is wrong is seen.
    vectors = {name: encode(texts) for name, encode in contestants.items()}
    seconds = turns_of(contestants, texts)
    faster = max(graphs, key=lambda name: -median(seconds[name]))
    lengths = [len(ids) for ids in embedder.tokenize(texts).sequences]
    products = sum(one * embedder.config.macs_per_token(one) for one in lengths)
    ceiling = device.measure_peak_macs(
        device.Machine(torch.device("cpu"), "fp32", "padded"), seconds=2.0
    )
    theirs = vectors["sentence-transformers"]
    ratios = {
        "float32 / sentence-transformers": ratio(seconds, "sentence-transformers", "float32"),
        "fast / onnxruntime in 8 bits": ratio(seconds, faster, "fast"),
        "fast / float32": ratio(seconds, "float32", "fast"),
        **{f"fast / {name}": ratio(seconds, name, "fast") for name in graphs},
        "float32 of the machine's matrix product": products / median(seconds["float32"]) / ceiling,
    }
    figures = {
        "texts": len(texts), "tokens": sum(lengths), "shortest": min(lengths),
        "longest": max(lengths), "threads": torch.get_num_threads(), "turns": TURNS,
        "largest difference to sentence-transformers": float(
            np.abs(vectors["float32"] - theirs).max()
        ),
        **{key: value for name in ("fast", *graphs)
           for key, value in cosines(name, vectors[name], vectors["float32"])},
        **{f"texts a second, {name}": len(texts) / median(own) for name, own in seconds.items()},
        **{f"batch size, {name}": graph.size for name, graph in graphs.items()},
    }  # fmt: skip
    if options.layers:
        found = layers(texts[: options.layers_count], embedder, folder)
        ratios["layer -12 / layer -1 of base"] = ratio(found, "-1", "-12")
    goals = {"float32": "float32 / sentence-transformers", "fast": "fast / onnxruntime in 8 bits",
             "layers": "layer -12 / layer -1 of base"}  # fmt: skip
    for name, key in goals.items():
        if key in ratios:
            ratios[f"of the goal of {GOALS[name]:g}, {name}"] = ratios[key] / GOALS[name]
    return ratios, figures


def main() -> None:
    """Measure, compare with the goals, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="a text a line")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--layers-count", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ratios, figures = compared(options, Path(folder))
    report("embed", ratios, figures, options.json)


if __name__ == "__main__":
    main()
