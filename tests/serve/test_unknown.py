"""The share of [UNK] tokens in a response header and in the metrics."""

import re
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER
from tests.serve.model_server import RunningServer, run_server

ENGLISH = "The smith struck the iron."
#: Korean: "The smith struck the iron."
KOREAN = "대장장이가 쇠를 쳤다."
#: Of the four tokens of KOREAN, only the full stop is in the English vocabulary.
NUM_KOREAN_TOKENS = 4
NUM_KOREAN_UNKNOWN_TOKENS = 3
#: Function that returns a request body with a text, for each endpoint.
CREATE_BODY: dict[str, Any] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/embed": lambda text: {"inputs": [text]},
    "/embed_all": lambda text: {"inputs": text},
    "/similarity": lambda text: {"inputs": {"source_sentence": text, "sentences": [text]}},
    "/tokenize": lambda text: {"inputs": text},
    "/fill": lambda text: {"inputs": f"{text} [MASK] [SEP]"},
    "/pair": lambda text: {"inputs": [text, text]},
    "/classify": lambda text: {"inputs": text},
    "/tag": lambda text: {"inputs": text},
    "/answer": lambda text: {"inputs": {"question": text, "context": text}},
    "/choose": lambda text: {"inputs": {"prompt": text, "endings": [text, text]}},
}


@pytest.mark.parametrize("path", CREATE_BODY)
def test_header_has_the_share_of_unknown_tokens(server: RunningServer, path: str) -> None:
    """Korean text sent to an English model gets the header, English text does not."""
    english = server.post(path, CREATE_BODY[path](ENGLISH))
    korean = server.post(path, CREATE_BODY[path](KOREAN))
    assert (english.status_code, korean.status_code) == (200, 200)
    assert UNKNOWN_SHARE_HEADER not in english.headers
    assert korean.headers[UNKNOWN_SHARE_HEADER] == "0.75"  # 3 of 4 tokens
    # The header does not change the format of the body.
    assert type(english.json()) is type(korean.json())


def test_share_is_computed_over_all_texts_of_a_request(server: RunningServer) -> None:
    """The share covers all texts of one request; one unknown word is below the threshold."""
    long = " ".join([ENGLISH] * 20)
    assert UNKNOWN_SHARE_HEADER not in server.post("/embed", {"inputs": [f"{long} 쇠"]}).headers
    mixed = server.post("/embed", {"inputs": [ENGLISH.removesuffix("."), KOREAN]})
    ids = server.post("/tokenize", {"inputs": [ENGLISH.removesuffix("."), KOREAN]}).json()
    tokens = [token["text"] for text in ids for token in text if not token["special"]]
    expected = tokens.count("[UNK]") / len(tokens)
    assert float(mixed.headers[UNKNOWN_SHARE_HEADER]) == pytest.approx(expected, rel=1e-3)


def _read_counter(page: str, name: str, model: str) -> float:
    """Return the value of a model's counter, 0 if it is missing."""
    match = re.search(rf'^{name}{{model="{model}"}} (\S+)$', page, re.MULTILINE)
    return float(match[1]) if match else 0.0


def test_metrics_count_unknown_tokens_by_model(models: list[ServedModel]) -> None:
    """Each model has counters of its text tokens and of its unknown tokens."""
    with run_server(models) as server:
        server.post("/embed", {"inputs": [KOREAN, KOREAN], "model": "plain"})
        server.post("/classify", {"inputs": KOREAN, "model": "mood"})
        page = httpx.get(f"{server.url}/metrics").text
        assert _read_counter(page, "bertsmith_text_tokens_total", "plain") == 2 * NUM_KOREAN_TOKENS
        assert (
            _read_counter(page, "bertsmith_unknown_tokens_total", "plain")
            == 2 * NUM_KOREAN_UNKNOWN_TOKENS
        )
        assert _read_counter(page, "bertsmith_text_tokens_total", "mood") == NUM_KOREAN_TOKENS
        assert (
            _read_counter(page, "bertsmith_unknown_tokens_total", "mood")
            == NUM_KOREAN_UNKNOWN_TOKENS
        )
        assert _read_counter(page, "bertsmith_unknown_tokens_total", "names") == 0
        assert UNKNOWN_SHARE_HEADER in httpx.get(f"{server.url}/docs").text


def test_scripts_of_other_origins_can_read_the_headers(models: list[ServedModel]) -> None:
    """CORS hides response headers from scripts unless they are listed as exposed."""
    with run_server(models[:1], origins=["https://a.example"]) as server:
        response = server.post(
            "/embed", {"inputs": KOREAN}, headers={"Origin": "https://a.example"}
        )
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {UNKNOWN_SHARE_HEADER, "Retry-After", "X-Request-Id"} <= set(exposed)
