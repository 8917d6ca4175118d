"""Export of an encoder as an OpenVINO graph in a sentence-transformers directory.

This module needs the optional packages ``onnx`` and ``openvino``, and ``nncf`` for 8 bits.
"""

import logging
import shutil
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bertsmith.bundle import EncoderBundle
from bertsmith.bundle.directory import OPENVINO_FILE, OPENVINO_INFO_KEY, get_model_name
from bertsmith.errors import InputError, require_extra
from bertsmith.files import atomic_directory
from bertsmith.interop.onnx.writing import MODEL_FILE, save_encoder_graph
from bertsmith.interop.openvino.encoder import INPUT_NAMES, get_core, import_openvino
from bertsmith.interop.sentence_transformers import PoolingConfig
from bertsmith.interop.sentence_transformers.writing import (
    get_max_seqlen,
    load_for_export,
    write_metadata,
)
from bertsmith.model.config import PoolingMode

#: Number of texts with which the ranges of activations are measured, as NNCF recommends.
NUM_CALIBRATION_TEXTS: Final = 300
#: A prefix of every n-th of these texts is used too.
_PREFIX_INTERVAL: Final = 10


def write_openvino(
    model: Path | str,
    out: Path | str,
    *,
    calibration: Iterable[str] | None = None,
    pooling: PoolingMode | None = None,
    normalize: bool | None = None,
) -> list[str]:
    """Write a model's encoder as an OpenVINO graph in a sentence-transformers directory.

    The directory contains no other weights. The graph is in openvino/openvino_model.xml, where
    sentence-transformers looks for it.

    Args:
        model: A model directory or run directory.
        out: A directory that is empty or does not exist.
        calibration: Texts like those to be embedded, to quantize weights and activations to 8 bits.
            The first 300 that are not blank are used. None for a graph in float32.
        pooling: The pooling mode. If None, the mode in ``model`` if it is a sentence-transformers
            directory, otherwise "mean".
        normalize: Whether vectors are scaled to length 1. If None, the value in ``model`` if it is
            a sentence-transformers directory, otherwise True.

    Returns:
        Notes for the user.

    Raises:
        ModelError: transformers' BERT cannot represent the model, or ``out`` is not empty.
        InputError: There is no text for calibration.
        MissingExtraError: A package is not installed.
    """
    out = Path(out)
    bundle, config = load_for_export(model, out, pooling, normalize)
    openvino = import_openvino("writing an OpenVINO graph")
    sequences: list[list[int]] | None = None
    notes: list[str] = []
    if calibration is not None:
        nncf = _import_nncf()
        sequences, notes = _tokenize(bundle, config, calibration)
    source = {"source": get_model_name(bundle.path), "bits": 32 if sequences is None else 8}
    with atomic_directory(out) as folder:
        work = folder / "work"
        work.mkdir()
        save_encoder_graph(bundle, work / MODEL_FILE)
        graph = get_core().read_model(work / MODEL_FILE)
        if sequences is not None:
            graph = _quantize(nncf, graph, sequences)
        (folder / OPENVINO_FILE).parent.mkdir()
        openvino.save_model(graph, folder / OPENVINO_FILE, compress_to_fp16=False)
        shutil.rmtree(work)
        # sentence-transformers passes the option for a missing pooler to PyTorch models only.
        info = {**bundle.info, OPENVINO_INFO_KEY: source}
        write_metadata(folder, bundle, config, info, has_pooler=True)
    return notes


def _tokenize(
    bundle: EncoderBundle, config: PoolingConfig, texts: Iterable[str]
) -> tuple[list[list[int]], list[str]]:
    """Return the token ids of the texts for calibration, and notes for the user.

    These are the first texts that are not blank, with the default prompt, and prefixes of them.
    """
    tokenizer = bundle.tokenizer
    selected = list(islice((text for text in texts if text.strip()), NUM_CALIBRATION_TEXTS))
    if not selected:
        raise InputError(
            "calibration: no text that is not blank; expected a few hundred texts like those to be "
            "embedded"
        )
    max_tokens = get_max_seqlen(config, bundle.config) - 2
    encoded = tokenizer.encode_batch(config.prepare_texts(selected, tokenizer))
    notes = []
    if len(encoded) < NUM_CALIBRATION_TEXTS:
        notes.append(
            f"only {len(encoded):,} texts for calibration; with {NUM_CALIBRATION_TEXTS} texts, the "
            "ranges of activations are more accurate"
        )
    # Activations of very short texts have other ranges, so the first 0 to 3 tokens of some texts
    # are used as texts too.
    prefixes = [ids[: index % 4] for index, ids in enumerate(encoded[::_PREFIX_INTERVAL])]
    sequences = [
        [tokenizer.cls_id, *ids[:max_tokens], tokenizer.sep_id] for ids in (*encoded, *prefixes)
    ]
    return sequences, notes


def _import_nncf() -> Any:
    """Return the package ``nncf`` with its telemetry disabled and only errors logged."""
    # NNCF logs to what is the standard output at the time of the import.
    with require_extra("openvino", "quantizing to 8 bits"), redirect_stdout(StringIO()):
        import nncf
        from openvino_telemetry import Telemetry
    # Without this, NNCF sends usage statistics.
    Telemetry().consent = False
    nncf.set_log_level(logging.ERROR)
    return nncf


def _quantize(nncf: Any, graph: Any, sequences: Sequence[list[int]]) -> Any:
    """Return the graph with weights and activations of 8 bits.

    Args:
        nncf: The package.
        graph: The ``openvino.Model``.
        sequences: Token ids of the texts for calibration.
    """

    def build_inputs(ids: list[int]) -> dict[str, NDArray[np.int64]]:
        values = (ids, [1] * len(ids), [0] * len(ids))
        return {
            name: np.array([row], np.int64) for name, row in zip(INPUT_NAMES, values, strict=True)
        }

    # NNCF prints progress bars to stdout, which is for results.
    with redirect_stdout(StringIO()):
        return nncf.quantize(
            graph,
            nncf.Dataset(sequences, build_inputs),
            subset_size=len(sequences),
            model_type=nncf.ModelType.TRANSFORMER,
            # Weights use half of the range, because sums of products overflow on CPUs without
            # 8-bit dot products (VNNI).
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE
            ),
        )
