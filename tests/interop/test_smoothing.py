"""What is evened out before 8 bits come: the same numbers, and no column far from the others.

These tests never quantize.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from bertsmith.bundle import EncoderBundle
from bertsmith.interop.onnx.heads import build_graph
from bertsmith.interop.onnx.smoothquant import apply_smoothquant
from bertsmith.interop.onnx.writing import _to_model_proto, _save
from bertsmith.model.bert import BertModel
from bertsmith.model.config import ModelConfig
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_sums_stay_the_same(tmp_path: Path, norm: str) -> None:
    """Before and after, the graph says the same to 1e-5, though its largest column is 50 times."""
    torch.manual_seed(5)
    words = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "a", "b", "c")))
    config = ModelConfig.parse(
        {"vocab_size": 8, "layers": 2, "width": 26, "heads": 2, "feed_forward": 37,
         "max_positions": 17, "norm": norm, "init_range": 0.3}, "a test",
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for name, own in model.named_parameters():
            if name.endswith("norm.weight"):
                own.uniform_(0.1, 1.0)
                own[3] = 50.0
    found = []
    for evened in (False, True):
        graph = build_graph(EncoderBundle(model, words, config, tmp_path))
        if evened:
            apply_smoothquant(graph)
            added = [node for node in graph.nodes if node.outputs[0].endswith(" evened")]
            # Queries, keys and values together, and what widens, in each of two layers.
            assert len(added) == 4
        _save(_to_model_proto(graph, {}), tmp_path / f"{evened}.onnx")
        session = onnxruntime.InferenceSession(
            tmp_path / f"{evened}.onnx", providers=["CPUExecutionProvider"]
        )
        ids = np.array([[2, 5, 6, 7, 3]], np.int64)
        feed = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0}
        found.append(session.run(None, feed)[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)
