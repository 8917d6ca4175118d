"""SmoothQuant for ONNX graphs, without quantization."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from bertsmith.bundle import EncoderBundle
from bertsmith.interop.onnx.heads import build_graph
from bertsmith.interop.onnx.smoothquant import apply_smoothquant
from bertsmith.interop.onnx.writing import _save, _to_model_proto
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_outputs_do_not_change(tmp_path: Path, norm: str) -> None:
    """SmoothQuant does not change the outputs of a model with one large activation column."""
    torch.manual_seed(5)
    tokenizer = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "a", "b", "c")))
    config = ModelConfig.parse(
        {"vocab_size": 8, "layers": 2, "width": 26, "heads": 2, "feed_forward": 37,
         "max_positions": 17, "norm": norm, "init_range": 0.3}, "a test",
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.1, 1.0)
                parameter[3] = 50.0
    outputs = []
    for is_smoothed in (False, True):
        graph = build_graph(EncoderBundle(model, tokenizer, config, tmp_path))
        if is_smoothed:
            apply_smoothquant(graph)
            smoothing_nodes = [
                node for node in graph.nodes if node.outputs[0].endswith("smoothed input")
            ]
            # In each of the two layers: query_key_value and the first feed-forward layer.
            assert len(smoothing_nodes) == 4
        _save(_to_model_proto(graph, {}), tmp_path / f"{is_smoothed}.onnx")
        session = onnxruntime.InferenceSession(
            tmp_path / f"{is_smoothed}.onnx", providers=["CPUExecutionProvider"]
        )
        ids = np.array([[2, 5, 6, 7, 3]], np.int64)
        feed = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids),
        }
        outputs.append(session.run(None, feed)[0])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
