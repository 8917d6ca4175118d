"""Compare the speed of sentence embeddings with sentence-transformers and onnxruntime.

All programs load the same model directory and embed the same texts of 5 to 250 tokens. They
alternate in one process, and tokenization is included: Bertsmith in float32 and with fast=True,
sentence-transformers with its defaults, and onnxruntime with 8-bit weights. onnxruntime gets
batches sorted by length, with the batch size that is fastest on a sample.

onnxruntime runs three graphs: Bertsmith's 8-bit export, and two quantized versions of PyTorch's
export, fused by onnxruntime's optimizer. One of these is quantized completely. The other one keeps
the layers that lose the most precision in float32. The fastest graph is the baseline, regardless of
its precision.

With --openvino, Bertsmith also embeds with its OpenVINO exports: in the precision that OpenVINO
chooses (bf16 if the CPU computes it fast), and in 8 bits, calibrated on 300 of the texts. This
needs the extra openvino.

With --layers, the benchmark also times embeddings from the lowest and the last layer of a random
model of base size.

    python benchmarks/embed.py --model DIR --texts FILE [--count 2000] [--openvino] [--layers]
        [--json FILE]
"""

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
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
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.runtime import device
from bertsmith.use.embed import Embedder

FloatArray = NDArray[np.float32]
Encode = Callable[[list[str]], FloatArray]

#: Minimum and maximum number of tokens in a text, including [CLS] and [SEP].
MIN_TOKENS = 5
MAX_TOKENS = 250
#: Batch sizes to try for onnxruntime.
BATCH_SIZES = (8, 16, 32, 64)
NUM_RUNS = 5
#: Target speed ratios of float32 embeddings, of fast=True, and of the lowest of twelve layers.
TARGET_RATIOS = {"float32": 2.0, "fast": 1.0, "layers": 5.0}
INPUT_NAMES = ["input_ids", "attention_mask", "token_type_ids"]


def read_texts(path: Path, count: int, embedder: Embedder) -> list[str]:
    """Return the first ``count`` lines of a file that have MIN_TOKENS to MAX_TOKENS tokens.

    Lines that contain a special token are skipped, because transformers parses special tokens in
    text and Bertsmith does not.
    """
    special_tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    with path.open(encoding="utf-8") as file:
        lines = (line.strip() for line in file)
        suitable_lines = (
            line
            for line in lines
            if not any(token in line for token in special_tokens)
            and MIN_TOKENS <= len(embedder.tokenizer.encode(line)) + 2 <= MAX_TOKENS
        )
        texts = list(islice(suitable_lines, count))
    if len(texts) < count:
        raise SystemExit(
            f"too few lines of {MIN_TOKENS} to {MAX_TOKENS} tokens in {path}: {len(texts):,}; "
            "use a smaller --count"
        )
    return texts


class OnnxEmbedder:
    """Computes normalized mean-pooled embeddings with an ONNX graph.

    Batches contain texts of similar length.
    """

    def __init__(self, path: Path, embedder: Embedder) -> None:
        """Load the graph at ``path``; ``embedder`` tokenizes the texts."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self.embedder = embedder
        self.batch_size = 32
        self.input_names = {node.name for node in self.session.get_inputs()}

    def __call__(self, texts: list[str]) -> FloatArray:
        """Return the embeddings of ``texts``, float32 [number of texts, D]."""
        sequences = self.embedder.tokenize(texts).sequences
        order = sorted(range(len(texts)), key=lambda index: -len(sequences[index]))
        vectors = np.empty((len(texts), self.embedder.config.width), np.float32)
        for first in range(0, len(order), self.batch_size):
            indices = order[first : first + self.batch_size]
            vectors[indices] = self._embed_batch([sequences[index] for index in indices])
        return vectors

    def _embed_batch(self, sequences: list[list[int]]) -> FloatArray:
        """Return the embeddings of a batch whose first sequence is the longest."""
        ids = np.zeros((len(sequences), len(sequences[0])), np.int64)
        mask = np.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = sequence
            mask[row, : len(sequence)] = 1
        inputs = dict(zip(INPUT_NAMES, (ids, mask, np.zeros_like(ids)), strict=True))
        # Some graphs have no input for segment ids.
        graph_inputs = {name: inputs[name] for name in INPUT_NAMES if name in self.input_names}
        (hidden, *_) = self.session.run(None, graph_inputs)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors: FloatArray = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return vectors

    def choose_batch_size(self, sample: list[str]) -> None:
        """Set ``batch_size`` to the one that is fastest on a sample."""
        seconds = {}
        for batch_size in BATCH_SIZES:
            self.batch_size = batch_size
            # Warm up.
            self(sample[:64])
            start = time.perf_counter()
            self(sample)
            seconds[batch_size] = time.perf_counter() - start
        self.batch_size = min(BATCH_SIZES, key=lambda batch_size: seconds[batch_size])


def export_bertsmith_int8(model: Path, directory: Path) -> Path:
    """Export the model as an 8-bit ONNX graph with Bertsmith and return its path."""
    write_onnx(model, directory / "bertsmith", int8=True)
    return directory / "bertsmith" / "model_quantized.onnx"


def export_fused_int8(model: Path, directory: Path, embedder: Embedder) -> dict[str, Path]:
    """Export transformers' model with PyTorch, fuse it with onnxruntime, and quantize it.

    Returns:
        Paths of two graphs by name: one is completely quantized, the other has the same float32
        layers as Bertsmith's export.
    """
    hf_model = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class LastHiddenState(torch.nn.Module):
        """Wrapper with positional inputs that returns only the last hidden state."""

        def __init__(self) -> None:
            super().__init__()
            self.model = hf_model

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> Any:
            return self.model(
                input_ids=ids, attention_mask=mask, token_type_ids=segments
            ).last_hidden_state

    ids = torch.ones(2, 9, dtype=torch.int64)
    plain, fused = directory / "plain.onnx", directory / "fused.onnx"
    with warnings.catch_warnings():
        # The TorchScript exporter is deprecated, but onnxruntime's optimizer needs its graphs.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            LastHiddenState(),
            (ids, ids, ids * 0),
            str(plain),
            input_names=INPUT_NAMES,
            output_names=["hidden"],
            dynamic_axes={name: {0: "B", 1: "S"} for name in [*INPUT_NAMES, "hidden"]},
            opset_version=17,
            dynamo=False,
        )
    config = embedder.config
    optimized = optimizer.optimize_model(
        str(plain),
        model_type="bert",
        num_heads=config.heads,
        hidden_size=config.width,
        opt_level=0,
        use_gpu=False,
    )
    num_fused = optimized.get_fused_operator_statistics()["Attention"]
    if num_fused != config.layers:
        raise SystemExit(
            f"onnxruntime's optimizer did not fuse all attention layers: {num_fused} of "
            f"{config.layers}; use another onnxruntime version"
        )
    optimized.save_model_to_file(str(fused))
    # The second feed-forward layer loses the most precision in 8 bits.
    down_layers = [
        node.name
        for node in optimized.model.graph.node
        if node.op_type == "MatMul"
        and "/output/dense/" in node.name
        and "/attention/" not in node.name
    ]
    assert len(down_layers) == config.layers
    paths = {}
    for name, excluded in (("fused, all in 8 bits", []), ("fused, part in float32", down_layers)):
        paths[name] = directory / f"{len(excluded)}.onnx"
        # The settings of onnxruntime's quantization tool. DefaultTensorType is needed because the
        # tool cannot infer the types of fused outputs. reduce_range (7 bits) avoids overflow on
        # CPUs without VNNI.
        quantize_dynamic(
            fused,
            paths[name],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
            nodes_to_exclude=excluded,
            extra_options={"DefaultTensorType": TensorProto.FLOAT},
        )
    return paths


def load_openvino(model: Path, directory: Path, texts: list[str]) -> dict[str, Encode]:
    """Export the model with Bertsmith for OpenVINO, and return an encoder for each precision."""
    # Needs the extra openvino.
    from bertsmith.interop.openvino.writing import write_openvino

    encoders: dict[str, Encode] = {}
    for name, calibration in (("OpenVINO", None), ("OpenVINO, 8 bits", texts)):
        write_openvino(model, directory / name, calibration=calibration)
        encoders[name] = Embedder.load(directory / name).encode
    return encoders


def time_encoders(encoders: dict[str, Encode], texts: list[str]) -> dict[str, list[float]]:
    """Return the seconds of each run by encoder name. In each run, another encoder is the first."""
    names = list(encoders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for run in range(NUM_RUNS):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            encoders[name](texts)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def speed_ratio(seconds: dict[str, list[float]], baseline: str, name: str) -> float:
    """Return the median speedup of encoder ``name`` over encoder ``baseline``."""
    pairs = zip(seconds[baseline], seconds[name], strict=True)
    return median(baseline_seconds / encoder_seconds for baseline_seconds, encoder_seconds in pairs)


def measure_cosines(
    name: str, vectors: FloatArray, expected: FloatArray
) -> Iterator[tuple[str, float]]:
    """Yield the minimum, first percentile and median cosine similarity to the expected vectors."""
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (vectors.astype(np.float64) * expected).sum(1) / norms
    yield f"minimum cosine to float32, {name}", float(cosines.min())
    yield f"first percentile of the cosine, {name}", float(np.percentile(cosines, 1))
    yield f"median cosine, {name}", float(np.median(cosines))


def time_layers(texts: list[str], embedder: Embedder, directory: Path) -> dict[str, list[float]]:
    """Return the seconds of embeddings from the last (-1) and lowest (-12) layer of BERT-base."""
    torch.manual_seed(0)
    config = ModelConfig.model_validate(
        {"vocab_size": embedder.tokenizer.vocab_size, **get_size_preset("base")}
    )
    base = Embedder(EncoderBundle(BertModel(config).eval(), embedder.tokenizer, config, directory))
    for layer in (-1, -12):
        base.encode(texts[:8], layer=layer)
    encoders: dict[str, Encode] = {
        str(layer): partial(base.encode, layer=layer) for layer in (-1, -12)
    }
    return time_encoders(encoders, texts)


def compare(
    options: argparse.Namespace, directory: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Compare all encoders and return ratios and measurements."""
    embedder = Embedder.load(options.model)
    texts = read_texts(options.texts, options.count, embedder)
    sentence_transformer = SentenceTransformer(str(options.model), device="cpu")
    graph_paths = {
        "Bertsmith's graph": export_bertsmith_int8(options.model, directory),
        **export_fused_int8(options.model, directory, embedder),
    }
    graphs = {
        f"onnxruntime, {name}": OnnxEmbedder(path, embedder) for name, path in graph_paths.items()
    }
    for graph in graphs.values():
        graph.choose_batch_size(texts[:: max(len(texts) // 300, 1)])
    encoders: dict[str, Encode] = {
        "float32": embedder.encode,
        "fast": Embedder.load(options.model, fast=True).encode,
        "sentence-transformers": sentence_transformer.encode,
        **graphs,
    }
    if options.openvino:
        encoders |= load_openvino(options.model, directory, texts)
    # This first call also warms up each encoder.
    vectors = {name: encode(texts) for name, encode in encoders.items()}
    seconds = time_encoders(encoders, texts)
    fastest_graph = min(graphs, key=lambda name: median(seconds[name]))
    lengths = [len(ids) for ids in embedder.tokenize(texts).sequences]
    macs = sum(length * embedder.config.macs_per_token(length) for length in lengths)
    peak = device.measure_peak_macs_per_second(
        device.Machine(torch.device("cpu"), "fp32", "padded"), seconds=2.0
    )
    expected = vectors["sentence-transformers"]
    ratios = {
        "float32 / sentence-transformers": speed_ratio(seconds, "sentence-transformers", "float32"),
        "fast / onnxruntime in 8 bits": speed_ratio(seconds, fastest_graph, "fast"),
        "fast / float32": speed_ratio(seconds, "float32", "fast"),
        **{
            f"fast / {name}": speed_ratio(seconds, name, "fast")
            for name in encoders
            if name not in ("float32", "fast")
        },
        "MFU, float32": macs / median(seconds["float32"]) / peak,
    }
    measurements = {
        "texts": len(texts), "tokens": sum(lengths), "shortest": min(lengths),
        "longest": max(lengths), "threads": torch.get_num_threads(), "runs": NUM_RUNS,
        "largest difference to sentence-transformers": float(
            np.abs(vectors["float32"] - expected).max()
        ),
        **{key: value for name in encoders
           if name not in ("float32", "sentence-transformers")
           for key, value in measure_cosines(name, vectors[name], vectors["float32"])},
        **{f"texts per second, {name}": len(texts) / median(times)
           for name, times in seconds.items()},
        **{f"batch size, {name}": graph.batch_size for name, graph in graphs.items()},
    }  # fmt: skip
    if options.layers:
        layer_seconds = time_layers(texts[: options.layers_count], embedder, directory)
        ratios["layer -12 / layer -1 of base"] = speed_ratio(layer_seconds, "-1", "-12")
    return ratios | compare_with_targets(ratios), measurements


def compare_with_targets(ratios: dict[str, float]) -> dict[str, float]:
    """Return each ratio that has a target, divided by its target."""
    ratio_names = {
        "float32": "float32 / sentence-transformers",
        "fast": "fast / onnxruntime in 8 bits",
        "layers": "layer -12 / layer -1 of base",
    }
    return {
        f"{name}, ratio / target ratio of {TARGET_RATIOS[name]:g}": (
            ratios[ratio_name] / TARGET_RATIOS[name]
        )
        for name, ratio_name in ratio_names.items()
        if ratio_name in ratios
    }


def main() -> None:
    """Run the comparison and report its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True, help="file with one text per line")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--openvino", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--layers-count", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        ratios, measurements = compare(options, Path(directory))
    report("embed", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
