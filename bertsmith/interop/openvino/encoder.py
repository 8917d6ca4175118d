"""Inference with an encoder that was exported as an OpenVINO graph, on the CPU.

This module needs the optional package ``openvino``.
"""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle, load_encoder
from bertsmith.bundle.directory import OPENVINO_FILE, describe_original_model, find_openvino_model
from bertsmith.bundle.metadata import read_metadata
from bertsmith.errors import ModelError, SettingsError, require_extra
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import PackedBatch
from bertsmith.runtime.thread_pool import choose_num_workers
from bertsmith.text.wordpiece import Tokenizer

#: Name of the output, as in Hugging Face Optimum.
OUTPUT_NAME: Final = "last_hidden_state"
#: Names of the inputs, as in Hugging Face Optimum. The last one is optional.
INPUT_NAMES: Final = ("input_ids", "attention_mask", "token_type_ids")

#: PyTorch's names of number formats by OpenVINO's names.
_DTYPE_NAMES: Final = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


class OpenVINOEncoder:
    """Computes the last hidden states of packed batches with an OpenVINO graph.

    Several threads can compute batches at the same time. They share the number of threads that
    PyTorch has when the graph is loaded, as the workers of ``map_in_threads`` do.

    Attributes:
        dtype_name: Number format of the computation, such as "bfloat16"; "int8" for a graph with
            quantized layers.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        precision: Literal["f32", "bf16"] | None = None,
    ) -> None:
        """Read and compile the graph in a model directory.

        Args:
            directory: A directory with an OpenVINO graph.
            config: The model's config.
            precision: Precision of everything that is not quantized. None for the choice of
                OpenVINO: bf16 on CPUs that compute it fast, otherwise float32.

        Raises:
            ModelError: The graph is damaged or is not an encoder.
            MissingExtraError: OpenVINO is not installed.
        """
        self.directory = directory
        self._num_layers = config.layers
        # If the package is missing, the error names the directory.
        import_openvino(f"{directory}: the OpenVINO graph")
        core = get_core()
        try:
            graph = core.read_model(directory / OPENVINO_FILE)
        except RuntimeError as error:
            # The last line has the reason, the others have positions in OpenVINO's source code.
            reason = str(error).strip().splitlines()[-1]
            raise ModelError(
                f"{directory / OPENVINO_FILE}: not a readable OpenVINO graph: {reason}; export the "
                "model again"
            ) from None
        self._input_names = self._check_graph(graph, config)
        num_workers = choose_num_workers(torch.device("cpu"))
        settings: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": num_workers,
        }
        if precision is not None:
            settings["INFERENCE_PRECISION_HINT"] = precision
        compiled = core.compile_model(graph, "CPU", settings)
        is_quantized = any(node.get_type_name() == "FakeQuantize" for node in graph.get_ops())
        type_name = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
        self.dtype_name = "int8" if is_quantized else _DTYPE_NAMES.get(type_name, type_name)
        #: Requests that no thread uses. A request computes one batch at a time.
        self._idle_requests: SimpleQueue[Any] = SimpleQueue()
        for _ in range(num_workers):
            self._idle_requests.put(compiled.create_infer_request())

    def _check_graph(self, graph: Any, config: ModelConfig) -> set[str]:
        """Return the names of the inputs; raise ModelError if the graph is not this encoder."""
        inputs = {name for node in graph.inputs for name in node.names}
        outputs = {name for node in graph.outputs for name in node.names}
        if not set(INPUT_NAMES[:2]) <= inputs <= set(INPUT_NAMES) or OUTPUT_NAME not in outputs:
            raise ModelError(
                f"{self.directory / OPENVINO_FILE}: expected the inputs {', '.join(INPUT_NAMES)} "
                f"and the output {OUTPUT_NAME}, found the inputs {', '.join(sorted(inputs))} and "
                f"the outputs {', '.join(sorted(outputs))}; export the model again"
            )
        width = graph.output(OUTPUT_NAME).get_partial_shape()[-1]
        if width.is_static and width.get_length() != config.width:
            raise ModelError(
                f"{self.directory / OPENVINO_FILE}: hidden states have width "
                f"{width.get_length()}, but config.json says {config.width}; export the model again"
            )
        return inputs

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the last hidden states of a batch, float32 [T, D]."""
        lengths = batch.cu_seqlens.diff().numpy()
        is_token = np.arange(batch.max_seqlen) < lengths[:, None]
        inputs = {"attention_mask": is_token.astype(np.int64)}
        for name, values in (("input_ids", batch.ids), ("token_type_ids", batch.segments)):
            if name in self._input_names:
                inputs[name] = np.zeros(is_token.shape, np.int64)
                inputs[name][is_token] = values.numpy()
        request = self._idle_requests.get()
        try:
            outputs = request.infer(inputs, share_inputs=True, share_outputs=True)
            # Indexing copies the hidden states out of the memory of the request.
            hidden: NDArray[np.float32] = outputs[OUTPUT_NAME][is_token]
        finally:
            self._idle_requests.put(request)
        return torch.from_numpy(hidden)

    def check_settings(self, layer_indices: tuple[int, ...], pooling: str) -> None:
        """Raise SettingsError if the graph does not compute the hidden states or the pooling.

        Args:
            layer_indices: Indices of the hidden states; 0 is the embeddings.
            pooling: The pooling; "pooled" needs BERT's pooler.
        """
        original = describe_original_model(self.directory)
        if layer_indices != (self._num_layers,):
            raise SettingsError(
                f"layers: the OpenVINO graph in {self.directory} computes only the last layer; for "
                f"other layers, use {original}"
            )
        if pooling == "pooled":
            raise SettingsError(
                f"pooling: the OpenVINO graph in {self.directory} has no pooler; for pooling "
                f'"pooled", use {original}'
            )


@dataclass(frozen=True)
class OpenVINOBundle:
    """An encoder as an OpenVINO graph in memory, with its tokenizer.

    Attributes:
        path: The model directory.
        info: The content of bertsmith.json.
    """

    model: OpenVINOEncoder
    tokenizer: Tokenizer
    config: ModelConfig
    path: Path
    info: dict[str, Any] = field(default_factory=dict)


#: A model that computes embeddings.
EmbeddingBundle = PretrainedBundle | FineTunedBundle | EncoderBundle | OpenVINOBundle


def load_embedding_encoder(
    path: Path | str, *, device: torch.device | str = "cpu"
) -> EncoderBundle | OpenVINOBundle:
    """Load an encoder for inference: its weights or, in a directory without weights, its graph.

    Args:
        path: A path or name as in ``load_encoder``, or a directory with an OpenVINO graph.
        device: The device of the weights; a graph always runs on the CPU.

    Raises:
        ModelError: A file is missing, damaged or inconsistent with the others.
        MissingExtraError: OpenVINO is not installed.
    """
    directory = find_openvino_model(path)
    if directory is None:
        return load_encoder(path, device=device)
    info, config, tokenizer = read_metadata(directory)
    return OpenVINOBundle(OpenVINOEncoder(directory, config), tokenizer, config, directory, info)


@cache
def get_core() -> Any:
    """Return the ``openvino.Core`` of this process, which is never freed.

    With the CPU plugin, a core replaces the alternate signal stack of its thread, and restores the
    previous one when it is freed. If several cores are not freed in reverse order, the stack that
    remains is unmapped memory, and the next signal, such as Ctrl-C, is a segmentation fault.
    """
    return import_openvino("OpenVINO graphs").Core()


def import_openvino(purpose: str) -> Any:
    """Return the package ``openvino``.

    Args:
        purpose: What needs the package, for the message.

    Raises:
        MissingExtraError: The package is not installed.
    """
    with require_extra("openvino", purpose, package="openvino"):
        import openvino
    return openvino
