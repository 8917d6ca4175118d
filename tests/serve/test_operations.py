"""Operation of a server: probes, reload, TLS, unix socket, and proxies."""

import json
import logging
import shutil
import signal
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from bertsmith import bundle
from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.serve import inspection
from bertsmith.serve.batching import Batcher, ComputedBatch
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.launch import check_certificate
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.explain import encode_text_or_pair
from tests.serve.model_pause import TIMEOUT, paused_model, wait_until
from tests.serve.model_server import find_fastapi_app, get_middleware, model_config, run_server
from tests.serve.server_process import find_free_port, run_process

FIXTURES = Path(__file__).parent / "fixtures"
CERTIFICATE = FIXTURES / "localhost.crt"
PRIVATE_KEY = FIXTURES / "localhost.key"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_probes_fail_when_a_model_thread_is_dead(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liveness and readiness return 503, so that the server is restarted."""

    def exit_thread(*_: Any, **__: Any) -> Any:
        raise SystemExit

    with run_server(models[:1], ServeSettings(request_timeout_seconds=0.5)) as server:
        for path in ("/health", "/ready"):
            assert httpx.get(server.url + path).status_code == 200
        monkeypatch.setattr(BertModel, "iter_hidden_states", exit_thread)
        assert server.post("/embed", {"inputs": "a"}).status_code == 504
        for path in ("/health", "/ready"):
            response = httpx.get(server.url + path)
            assert response.status_code == 503
            assert "a model thread has died" in response.json()["error"]["message"]
    # The command exits with status 1, although the server was stopped by a signal.
    assert get_middleware(server).control.has_failed()


def test_second_ctrl_c_answers_running_requests_with_503(models: list[ServedModel]) -> None:
    """After a second Ctrl-C, the server rejects the running requests instead of computing them."""
    with (
        run_server(models[:1]) as server,
        paused_model() as pause,
        ThreadPoolExecutor() as executor,
    ):
        running = executor.submit(server.post, "/embed", {"inputs": "a"})
        assert pause.started.wait(TIMEOUT)
        assert server.server is not None
        for _ in range(2):
            server.server.handle_exit(signal.SIGINT, None)
        response = running.result(TIMEOUT)
        assert response.status_code == 503
        assert "the server is shutting down" in response.json()["error"]["message"]
        pause.resume.set()


def test_ctrl_c_twice_logs_no_traceback(model_dirs: dict[str, Path]) -> None:
    """A server that gets Ctrl-C twice within 20 ms exits with status 0 and logs nothing."""
    with run_process(model_dirs["plain"], "--port", str(find_free_port())) as server:
        num_lines = len(server.lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        assert server.stop(signal.SIGINT) == 0
        assert "".join(server.lines[num_lines:]).strip() == ""


def test_draining_server_is_live_but_not_ready(models: list[ServedModel]) -> None:
    """While the server drains, it answers requests, but load balancers should use others."""
    with run_server(models[:1]) as server:
        get_middleware(server).control.is_draining = True
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.post("/embed", {"inputs": "a"}).status_code == 200


def test_replaced_models_answer_later_requests(
    models: list[ServedModel], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A running request is answered by the previous model, and a later one by the new model."""
    torch.manual_seed(5)
    bundle.save(tmp_path / "m", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    replacement = load_served_model("plain", tmp_path / "m")
    with (
        run_server(models[:1]) as server,
        ThreadPoolExecutor(2) as pool,
        paused_model() as pause,
    ):
        running = pool.submit(server.post, "/embed", {"inputs": "a hammer"})
        assert pause.started.wait(TIMEOUT)
        get_middleware(server).control.replace_models([replacement])
        later = pool.submit(server.post, "/embed", {"inputs": "a hammer"})
        pause.resume.set()
        vectors = [future.result(TIMEOUT).json()[0] for future in (running, later)]
    for model, vector in zip((models[0], replacement), vectors, strict=True):
        expected = model.embedder.encode(["a hammer"], normalize=True)[0]
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_request_uses_one_version_of_a_model(
    models: list[ServedModel],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that is replaced after the layers were selected does not change the answer."""
    config = model_config(tokenizer).model_copy(update={"layers": 1})
    bundle.save(tmp_path / "m", BertForPreTraining(config), tokenizer, {})
    replacement = load_served_model("plain", tmp_path / "m")

    with run_server(models[:1]) as server:
        app: Any = server.server.config.app
        service: Service = find_fastapi_app(app).state.service

        def replace_and_encode(*args: Any) -> Any:
            service.replace_models([replacement])
            return encode_text_or_pair(*args)

        expected = server.post("/attention", {"inputs": "a hammer"}).json()
        monkeypatch.setattr(inspection, "encode_text_or_pair", replace_and_encode)
        response = server.post("/attention", {"inputs": "a hammer"})
    assert response.status_code == 200
    assert [item["layer"] for item in response.json()["maps"]] == [1, 1, 2, 2]
    assert response.json()["tokens"] == expected["tokens"]


def test_sighup_reloads_models_and_keys(
    model_dirs: dict[str, Path], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """The process answers with the new model and keys; a broken model changes nothing."""
    shutil.copytree(model_dirs["plain"], tmp_path / "m")
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "first"\n')
    port = find_free_port()

    def embed(key: str) -> httpx.Response:
        return httpx.post(
            f"http://127.0.0.1:{port}/embed",
            json={"inputs": "a hammer"},
            headers={"Authorization": f"Bearer {key}"},
            timeout=TIMEOUT,
        )

    with run_process(tmp_path / "m", "--port", str(port), "--key-file", str(keys)) as server:
        wait_until(lambda: _accepts(port))
        before = embed("first").json()
        torch.manual_seed(6)
        shutil.rmtree(tmp_path / "m")
        bundle.save(tmp_path / "m", BertForPreTraining(model_config(tokenizer)), tokenizer, {})
        keys.write_text('[bob]\nkey = "second"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("reloaded the models and keys")
        assert embed("first").status_code == 401
        after = embed("second").json()
        assert not np.allclose(before, after, atol=1e-3)
        (tmp_path / "m" / "config.json").write_text("{")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("reload failed, nothing changed")
        assert embed("second").json() == after
        assert server.stop() == 0
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    assert {(line["key"], line["status"]) for line in lines if "key" in line} == {
        ("alice", 200), ("bob", 200),
    }  # fmt: skip


def test_keys_are_reloaded_without_a_reader_of_the_log(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """If stderr cannot be written, every SIGHUP still revokes the keys removed from the file."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "0"\n')
    port = find_free_port()

    def is_accepted(key: str) -> bool:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"http://127.0.0.1:{port}/models"
        return httpx.get(url, headers=headers, timeout=TIMEOUT).status_code == 200

    options = ["--port", str(port), "--key-file", str(keys)]
    with run_process(model_dirs["plain"], *options) as server:
        assert server.process.stderr is not None
        server.process.stderr.close()
        for previous, key in (("0", "1"), ("1", "2")):
            keys.write_text(f'[alice]\nkey = "{key}"\n')
            server.process.send_signal(signal.SIGHUP)
            wait_until(lambda previous=previous: not is_accepted(previous))  # type: ignore[misc]
            assert is_accepted(key)
        server.process.terminate()
        assert server.process.wait(TIMEOUT) == 0


def _accepts(port: int) -> bool:
    """Return whether a server answers on a port."""
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_server_process_uses_tls_and_a_root_path(model_dirs: dict[str, Path]) -> None:
    """HTTPS works with the certificate, and the documented address has the path of the proxy."""
    port = find_free_port()
    options = ["--port", str(port), "--root-path", "bert/"]
    options += ["--ssl-certfile", str(CERTIFICATE), "--ssl-keyfile", str(PRIVATE_KEY)]
    context = ssl.create_default_context(cafile=str(CERTIFICATE))
    transport = httpx.HTTPTransport(verify=context, retries=10)
    url = f"https://localhost:{port}"
    with (
        run_process(model_dirs["plain"], *options) as server,
        httpx.Client(transport=transport, timeout=TIMEOUT, base_url=url) as client,
    ):
        assert f"https://127.0.0.1:{port}" in server.lines[-1]
        assert client.post("/embed", json={"inputs": "a"}).status_code == 200
        schema = client.get("/openapi.json").json()
        assert schema["servers"] == [{"url": f"{url}/bert"}]
        # The idle connection of the client does not delay the end of the server.
        start = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < ServeSettings().shutdown_timeout_seconds / 2


def test_certificate_errors_name_the_option(tmp_path: Path) -> None:
    """A missing file, and a key that does not belong to the certificate, are user errors."""
    with pytest.raises(SettingsError, match=r"--ssl-keyfile .*missing: no such file"):
        check_certificate(CERTIFICATE, tmp_path / "missing")
    with pytest.raises(SettingsError, match="cannot be used"):
        check_certificate(CERTIFICATE, CERTIFICATE)
    check_certificate(CERTIFICATE, PRIVATE_KEY)


def test_server_process_listens_on_a_unix_socket(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Clients connect through the socket's path, and any Host header is accepted."""
    path = tmp_path / "server.sock"
    with run_process(model_dirs["plain"], "--uds", str(path)) as server:
        transport = httpx.HTTPTransport(uds=str(path), retries=10)
        with httpx.Client(transport=transport, timeout=TIMEOUT) as client:
            assert client.post("http://bert/embed", json={"inputs": "a"}).status_code == 200
        assert server.stop() == 0
    assert any('"client":"unix"' in line for line in server.lines)


@pytest.mark.parametrize(("is_trusted", "address"), [(True, "192.0.2.7"), (False, "127.0.0.1")])
def test_forwarded_address_is_used_only_for_trusted_proxies(
    models: list[ServedModel], caplog: pytest.LogCaptureFixture, is_trusted: bool, address: str
) -> None:
    """The log has the address of X-Forwarded-For if the proxy is trusted, else the peer's."""
    options = {"proxy_headers": True, "forwarded_allow_ips": ["127.0.0.1"]} if is_trusted else {}
    with (
        caplog.at_level(logging.INFO, "bertsmith.serve"),
        run_server(models[:1], uvicorn_options=options) as server,
    ):
        headers = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
        assert httpx.get(f"{server.url}/models", headers=headers).status_code == 200
        wait_until(lambda: "/models" in caplog.text)
    lines = [json.loads(record.message) for record in caplog.records if "/models" in record.message]
    assert [line["client"] for line in lines] == [address]


def test_paths_are_checked_without_the_root_path(models: list[ServedModel]) -> None:
    """Probes and the page need no key, also if a proxy publishes the server under a path."""
    options = {"root_path": "/bert"}
    with run_server(
        models[:1], key="open", has_page=True, hosts=("bert.example",), uvicorn_options=options
    ) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        host = {"Host": "bert.example"}
        assert httpx.get(server.url, headers=host).status_code == 200
        assert httpx.get(f"{server.url}/models", headers=host).status_code == 401


def read_metrics(url: str) -> dict[str, float]:
    """Return the value of each time series of /metrics, by its name and labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in values}


def test_metrics_have_the_load_of_each_model(models: list[ServedModel]) -> None:
    """Sequences, tokens, batches and waiting time are counted per model; memory per process."""
    settings = ServeSettings(request_timeout_seconds=TIMEOUT)
    with run_server(models[:2], settings) as server, ThreadPoolExecutor(3) as pool:
        names = [model.name for model in models[:2]]
        bodies: list[Any] = [
            {"model": names[0], "inputs": ["a", "a"]},
            {"model": names[1], "inputs": "a"},
        ]
        with paused_model() as pause:
            futures = [pool.submit(server.post, "/embed", body) for body in bodies]
            assert pause.started.wait(TIMEOUT)
            wait_until(lambda: read_metrics(server.url)["bertsmith_running_requests"] == 3)
            pause.resume.set()
        assert [future.result(TIMEOUT).status_code for future in futures] == [200, 200]

        def count(name: str) -> list[float]:
            metrics = read_metrics(server.url)
            return [metrics.get(f'{name}{{model="{model}"}}', 0.0) for model in names]

        # The counters are increased after the response is sent.
        wait_until(lambda: count("bertsmith_queue_seconds_count") == [1, 1])
        assert count("bertsmith_sequences_total") == [2, 1]
        assert count("bertsmith_batch_sequences_sum") == [2, 1]
        # Each sequence has [CLS], one word and [SEP].
        assert count("bertsmith_tokens_total") == [6, 3]
        assert count("bertsmith_batch_tokens_sum") == [6, 3]
        assert all(seconds > 0 for seconds in count("bertsmith_model_seconds_total"))
        metrics = read_metrics(server.url)
        # The request for the metrics itself is running.
        assert metrics["bertsmith_running_requests"] == 1
        assert metrics["bertsmith_waiting_tokens"] == 0
        assert metrics["process_resident_memory_bytes"] > 2**20


def test_queue_time_is_that_before_the_first_sequence() -> None:
    """A call in two batches counts once, with the time until the first batch starts."""
    now = 100.0
    batches: list[ComputedBatch] = []

    def compute(payloads: list[Any]) -> list[Any]:
        nonlocal now
        now += 5.0
        return payloads

    batcher = Batcher(
        max_batch_tokens=10,
        max_queue_tokens=100,
        max_call_tokens=100,
        max_wait_seconds=0.0,
        on_batch=batches.append,
        clock=lambda: now,
    )
    deadline = Deadline(TIMEOUT)
    deadline.expires_at = 1000.0
    batcher.submit("key", compute, [(10, 1), (10, 2)], deadline).result(TIMEOUT)
    batcher.close(TIMEOUT)
    assert [(batch.num_tokens, batch.seconds, batch.wait_seconds) for batch in batches] == [
        (10, 5.0, [0.0]), (10, 5.0, []),
    ]  # fmt: skip
