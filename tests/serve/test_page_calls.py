"""What clients can do to the page without a browser: its routes and their limits."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from bertsmith.serve.models import ServedModel
from bertsmith.serve.service import Service
from tests.serve.model_server import TEXT, RunningServer, run_server, wait_until

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from bertsmith.serve.page import mount, page
from bertsmith.serve.page.calls import CallRoutes, _Stream
from bertsmith.serve.page.jobs import JobQueue

API = "/gradio_api"


@pytest.fixture(scope="module")
def server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with the page."""
    with run_server(models, page=mount) as running:
        yield running


@pytest.fixture(scope="module")
def dependencies(server: RunningServer) -> list[dict[str, Any]]:
    """The functions of the page, as its description names them."""
    config: dict[str, Any] = httpx.get(f"{server.url}/config").json()
    functions: list[dict[str, Any]] = config["dependencies"]
    return functions


def index_of(dependencies: list[dict[str, Any]], num_inputs: int, api_name: str) -> int:
    """Return the number of a page function by the start of its name and its inputs."""
    return next(
        int(function["id"]) for function in dependencies
        if function["api_name"].startswith(api_name) and len(function["inputs"]) == num_inputs
    )  # fmt: skip


def read(server: RunningServer, session: str) -> list[dict[str, Any]]:
    """Return all messages of a session."""
    way = f"{server.url}{API}/queue/data"
    text = httpx.get(way, params={"session_hash": session}, timeout=60).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def file_data(path: str) -> dict[str, Any]:
    """Return what Gradio takes for a file."""
    return {"path": path, "url": path, "meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    "nest", [lambda value: value, lambda value: [value], lambda value: [[value]]]
)
@pytest.mark.parametrize("path", ["/dev/zero", __file__, "http://127.0.0.1:1/file"])
def test_objects_in_inputs_are_refused(
    server: RunningServer, dependencies: list[dict[str, Any]], nest: Any, path: str
) -> None:
    """An object never reaches Gradio, which would read the file or URL that it names."""
    value = nest(file_data(path))
    index = index_of(dependencies, 4, "show")
    ways = {
        "run/word": {"data": ["w", value, 1, "plain"]},
        "call/word": {"data": ["w", value, 1, "plain"]},
        "queue/join": {"data": ["plain", "w", value, 1], "fn_index": index, "session_hash": "a"},
    }
    for way, body in ways.items():
        response = server.post(f"{API}/{way}", body)
        assert response.status_code == 422, way
        assert "expected a text" in response.json()["detail"], way
    # Functions of the page itself have no names for programs.
    assert server.post(f"{API}/run/show", {"data": ["plain", "w", value, 1]}).status_code == 404
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_gradio_checks_paths_too(models: list[ServedModel], tmp_path: Path) -> None:
    """Gradio itself refuses files outside its own folder, if an object ever reached it."""
    from gradio.context import LocalContext
    from gradio.exceptions import InvalidPathError
    from gradio.processing_utils import _check_allowed

    path = tmp_path / "secret"
    path.write_text("secret", "utf-8")
    service = Service(models[:1])
    token = LocalContext.blocks.set(page(service))
    try:
        with pytest.raises(InvalidPathError):
            _check_allowed(path, check_in_upload_folder=True)
    finally:
        LocalContext.blocks.reset(token)
        service.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (["my secret"], "data is invalid; expected a list of 4 values"),
        (["my secret"] * 5, "data is invalid; expected a list of 4 values"),
        ("my secret", "data is invalid; expected a list of 4 values"),
        ([1, "my secret", "a", 1], "data[0] is invalid; expected a text or null"),
        (["plain", None, "my secret", 1], "data[1] is invalid; expected a text"),
        (["plain", "my secret", "a", "1"], "data[3] is invalid; expected a number of at least 0"),
        (["plain", "my secret", "a", -1], "data[3] is invalid; expected a number of at least 0"),
        (["plain", "my secret", "a", True], "data[3] is invalid; expected a number of at least 0"),
    ],
)
def test_wrong_inputs_are_refused_and_not_logged(
    server: RunningServer, dependencies: list[dict[str, Any]], data: Any, message: str,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The client is told what is expected; no part of the inputs is printed or logged."""
    body = {"data": data, "fn_index": index_of(dependencies, 4, "show"), "session_hash": "a"}
    response = server.post(f"{API}/queue/join", body)
    assert (response.status_code, response.json()["detail"]) == (422, message)
    printed = capfd.readouterr()
    assert "secret" not in printed.out + printed.err + caplog.text + response.text


@pytest.mark.parametrize(
    ("way", "body", "status"),
    [
        ("queue/join", {"data": [], "fn_index": 9999, "session_hash": "a"}, 404),
        ("queue/join", {"data": [], "fn_index": True, "session_hash": "a"}, 404),
        ("queue/join", {"data": [], "fn_index": 3}, 422),
        ("queue/join", {"data": [], "fn_index": 3, "session_hash": "a" * 65}, 422),
        ("queue/join", {"data": [], "fn_index": 3, "session_hash": ["a"]}, 422),
        ("queue/join", [], 422),
        ("run/nothing", {"data": []}, 404),
        ("run/fill", {"data": [1, 5, ""]}, 422),
        ("run/fill", {"data": ["no mask", 5, ""]}, 422),
    ],
)
def test_invalid_calls_are_refused(server: RunningServer, way: str, body: Any, status: int) -> None:
    """A 4xx that says why, whatever is sent."""
    response = server.post(f"{API}/{way}", body)
    assert response.status_code == status
    assert response.json().keys() <= {"detail", "error"}


def test_other_types_of_bodies_are_refused(server: RunningServer) -> None:
    """Pages of other sites may send text without asking the server first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = httpx.post(
            f"{server.url}{API}/run/fill", content=b'{"data": ["[MASK]", 5, ""]}',
            headers={"Content-Type": kind},
        )  # fmt: skip
        assert response.status_code == 415
    response = httpx.post(
        f"{server.url}{API}/run/fill", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, response.json()["detail"]) == (422, "the body is not JSON")


def test_an_event_names_a_head(server: RunningServer, dependencies: list[dict[str, Any]]) -> None:
    """A choice in the grid of heads is two integers; a head that is not there is the nearest."""
    index = index_of(dependencies, 3, "chosen")
    data = ["plain", TEXT[0], ""]
    for event in (None, {}, {"layer": 1}, {"layer": 1, "head": {}}, {"layer": "1", "head": 1}):
        body = {"data": data, "fn_index": index, "session_hash": "b", "event_data": event}
        assert server.post(f"{API}/queue/join", body).status_code == 422
    for layer in (-9, 99):
        body["event_data"] = {"layer": layer, "head": 1}
        server.post(f"{API}/queue/join", body)
        completed, _ = read(server, "b")
        assert completed["success"], completed
        assert f"Layer {1 if layer < 0 else 2}, head 1" in completed["output"]["data"][2]


def test_calls_by_name(server: RunningServer) -> None:
    """Programs call a public function at once, or queue it and read its result."""
    body = {"data": [f"the [MASK] {TEXT[0]}", 2, ""]}
    direct = server.post(f"{API}/run/fill", body).json()["data"]
    assert len(direct[0][0]["words"]) == 2
    event = server.post(f"{API}/call/fill", body).json()["event_id"]
    text = httpx.get(f"{server.url}{API}/call/fill/{event}", timeout=60).text
    assert text.startswith("event: complete\ndata: ")
    assert json.loads(text.removeprefix("event: complete\ndata: ")) == direct
    event = server.post(f"{API}/call/v2/fill", {"text": body["data"][0], "top": 2}).json()
    text = httpx.get(f"{server.url}{API}/call/fill/{event['event_id']}", timeout=60).text
    assert json.loads(text.removeprefix("event: complete\ndata: ")) == direct
    for named in ({"top": 2}, {"text": "a", "other": 1}, {"text": file_data(__file__)}):
        assert server.post(f"{API}/call/v2/fill", named).status_code == 422
    event = server.post(f"{API}/call/fill", {"data": ["no mask", 2, ""]}).json()["event_id"]
    text = httpx.get(f"{server.url}{API}/call/fill/{event}", timeout=60).text
    assert text.startswith("event: error\ndata: ")
    assert "no [MASK]" in text


def test_open_connections_do_not_block_the_page(server: RunningServer) -> None:
    """A stream without a pending call ends at once; there is nothing else to keep open."""
    assert httpx.get(f"{server.url}{API}/heartbeat/a").status_code == 404
    assert [message["msg"] for message in read(server, "unknown")] == ["close_stream"]


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream ends, and does not hold a place of an open page for ever."""

    async def content() -> AsyncIterator[bytes]:
        yield b"a message"

    async def never(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("bertsmith.serve.page.calls._SEND_SECONDS", 0.0)
    asyncio.run(_Stream(content()).stream_response(never))


def test_all_routes_share_the_limit_of_the_queue() -> None:
    """A full queue refuses calls of the page and of programs alike."""
    gate = threading.Event()
    function = SimpleNamespace(
        fn=gate.wait, inputs=[], outputs=[None], api_name="wait", api_visibility="public",
        collects_event_data=False,
    )  # fmt: skip

    async def scenario() -> None:
        jobs = JobQueue(max_pending=2)
        app = Starlette(routes=CallRoutes(SimpleNamespace(fns={0: function}), jobs).routes())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"data": [], "fn_index": 0, "session_hash": "a"}
            first = await client.post(f"{API}/queue/join", json=body)
            second = asyncio.create_task(client.post(f"{API}/run/wait", json={"data": []}))
            await wait_until(lambda: jobs.num_pending == 2)
            for way in ("queue/join", "run/wait", "call/wait"):
                refused = await client.post(f"{API}/{way}", json=body)
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
            gate.set()
            assert (await second).json() == {"data": [True]}
            assert first.status_code == 200
        jobs.close()

    async def scenario_in_time() -> None:
        async with asyncio.timeout(60):
            await scenario()

    try:
        asyncio.run(scenario_in_time())
    finally:
        gate.set()


def test_only_parts_of_gradio_are_served(server: RunningServer) -> None:
    """Nothing of Gradio's app answers but what the page needs, and that by GET alone."""
    for path in ("/", "/config", f"{API}/info", "/theme.css", "/manifest.json"):
        assert httpx.get(server.url + path).status_code == 200, path
        assert httpx.post(server.url + path).status_code == 405, path
    for path in (
        f"{API}/upload", f"{API}/file={__file__}", f"{API}/component_server", f"{API}/reset",
        f"{API}/cancel", f"{API}/vibe-code", f"{API}/openapi.json", f"{API}/startup-events",
        "/monitoring", "/svelte/index.js", "/login", "/nowhere",
    ):  # fmt: skip
        for method in ("GET", "POST"):
            response = server._client.request(method, server.url + path)
            assert response.status_code == 404, path
            assert response.json()["error"]["code"] == 404
    assert httpx.get(f"{server.url}/assets/..%2f..%2f..%2froutes.py").status_code in (403, 404)


def test_no_request_chooses_where_the_page_is(server: RunningServer) -> None:
    """Neither Host nor X-Forwarded-Host is in the page; the browser knows its own address."""
    usual = {way: httpx.get(server.url + way).text for way in ("/", "/config", f"{API}/info")}
    for name in ("Host", "X-Forwarded-Host", "X-Gradio-Server", "X-Forwarded-Proto"):
        for way, text in usual.items():
            response = server._client.get(server.url + way, headers={name: "evil.example"})
            assert response.text == text
    assert httpx.get(f"{server.url}/?deep_link=a&page=b").text == usual["/"]
    assert json.loads(usual["/config"])["root"] == ""
    assert re.search(r'"root":new URL\("\."', usual["/"])


def test_the_page_has_a_content_security_policy(server: RunningServer) -> None:
    """Only its own scripts run, and nothing is loaded from or sent to another host."""
    response = httpx.get(server.url)
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    sources = {source for value in policy.values() for source in value.split()}
    hashes = {source for source in sources if source.startswith("'sha256-")}
    assert sources - hashes == {"'none'", "'self'", "'unsafe-eval'", "'unsafe-inline'", "data:"}
    assert "'unsafe-inline'" not in policy["script-src"]
    assert len(hashes) == response.text.count("<script>") + response.text.count("<script data-")
