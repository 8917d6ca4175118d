"""The server embeds texts with an OpenVINO graph and offers nothing else for this model."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import ModelError
from bertsmith.interop.openvino import OpenVINOEncoder
from bertsmith.interop.openvino.writing import write_openvino
from bertsmith.serve.models import load_served_model
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.tei import describe_model
from bertsmith.use.explain import encode_text_or_pair
from tests.serve.model_server import SENTENCES, run_server

pytest.importorskip("openvino", reason="pip install 'bertsmith[openvino]'")


def test_server_embeds_with_the_graph(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    """/v1/embeddings has the vectors of the original model; only that one has attention."""
    source = next(iter(model_dirs.values()))
    write_openvino(source, tmp_path / "out", normalize=False)
    served = load_served_model("graph", tmp_path / "out")
    assert served.tasks == {"embed"}
    with pytest.raises(ModelError, match=r"attention probabilities; use the original model"):
        encode_text_or_pair(served.bundle, "a text", None, None)
    with run_server([served, load_served_model("original", source)]) as server:
        vectors = [
            server.post("/v1/embeddings", {"model": name, "input": ["a text"]}).json()["data"][0]
            for name in ("graph", "original")
        ]
        for path, body in (
            ("/attention", {"inputs": "a text"}),
            ("/word_distances", {"inputs": ["a text", "a word"], "word": "a"}),
        ):
            # By default, the first model that supports the task answers.
            assert server.post(path, body).status_code == 200
            response = server.post(path, {**body, "model": "graph"})
            assert response.status_code == 404
            message = response.json()["error"]["message"]
            assert message == (
                "the model 'graph' cannot inspect, which needs the weights of an encoder; expected "
                "one of original"
            )
    graph, original = (np.array(vector["embedding"]) for vector in vectors)
    cosine = graph @ original / np.linalg.norm(graph) / np.linalg.norm(original)
    assert cosine > 0.999


def test_info_has_the_number_format(model_dirs: dict[str, Path], tmp_path: Path) -> None:
    """OpenVINO chooses it for the processor, unless it is set; a graph in 8 bits has int8."""
    write_openvino(model_dirs["plain"], tmp_path / "plain")
    served = load_served_model("graph", tmp_path / "plain")
    name = describe_model(served, ServeSettings())["model_dtype"]
    assert name in ("float32", "bfloat16", "float16")
    assert OpenVINOEncoder(tmp_path / "plain", served.bundle.config, "f32").dtype_name == "float32"
    pytest.importorskip("nncf", reason="pip install 'bertsmith[openvino]'")
    write_openvino(model_dirs["plain"], tmp_path / "out", calibration=SENTENCES)
    served = load_served_model("graph", tmp_path / "out")
    assert describe_model(served, ServeSettings())["model_dtype"] == "int8"
