"""Routes of the page, used without a browser: calls, invalid inputs and limits."""

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
from tests.serve.model_server import SENTENCES, RunningServer, run_server, wait_until

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from bertsmith.serve.page import mount, page
from bertsmith.serve.page.calls import CallRoutes, _Stream
from bertsmith.serve.page.jobs import JobQueue

API = "/gradio_api"


@pytest.fixture(scope="module")
def server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with the page."""
    with run_server(models, mount_page=mount) as running:
        yield running


@pytest.fixture(scope="module")
def dependencies(server: RunningServer) -> list[dict[str, Any]]:
    """The page's functions in Gradio's configuration."""
    config: dict[str, Any] = httpx.get(f"{server.url}/config").json()
    functions: list[dict[str, Any]] = config["dependencies"]
    return functions


def index_of(dependencies: list[dict[str, Any]], num_inputs: int, api_name: str) -> int:
    """Return the index of the function with a name prefix and a number of inputs."""
    return next(
        int(function["id"])
        for function in dependencies
        if function["api_name"].startswith(api_name) and len(function["inputs"]) == num_inputs
    )


def read_messages(server: RunningServer, session: str) -> list[dict[str, Any]]:
    """Return all messages of a session's event stream."""
    url = f"{server.url}{API}/queue/data"
    text = httpx.get(url, params={"session_hash": session}, timeout=60).text
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def file_data(path: str) -> dict[str, Any]:
    """Return an object that Gradio treats as a file."""
    return {"path": path, "url": path, "meta": {"_type": "gradio.FileData"}}


@pytest.mark.parametrize(
    "nest", [lambda value: value, lambda value: [value], lambda value: [[value]]]
)
@pytest.mark.parametrize("path", ["/dev/zero", __file__, "http://127.0.0.1:1/file"])
def test_objects_in_inputs_are_rejected(
    server: RunningServer, dependencies: list[dict[str, Any]], nest: Any, path: str
) -> None:
    """Gradio would read the file or URL that an object names."""
    value = nest(file_data(path))
    index = index_of(dependencies, 4, "show")
    bodies = {
        "run/word": {"data": ["w", value, 1, "plain"]},
        "call/word": {"data": ["w", value, 1, "plain"]},
        "queue/join": {"data": ["plain", "w", value, 1], "fn_index": index, "session_hash": "a"},
    }
    for route, body in bodies.items():
        response = server.post(f"{API}/{route}", body)
        assert response.status_code == 422, route
        assert "expected a text" in response.json()["detail"], route
    # The page's own functions cannot be called by name.
    assert server.post(f"{API}/run/show", {"data": ["plain", "w", value, 1]}).status_code == 404
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_gradio_also_checks_file_paths(models: list[ServedModel], tmp_path: Path) -> None:
    """If an object reached Gradio, files outside its upload folder would be rejected."""
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
def test_invalid_inputs_are_rejected_and_not_logged(
    server: RunningServer,
    dependencies: list[dict[str, Any]],
    data: Any,
    message: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error says what is expected; the inputs are neither printed nor logged."""
    body = {"data": data, "fn_index": index_of(dependencies, 4, "show"), "session_hash": "a"}
    response = server.post(f"{API}/queue/join", body)
    assert (response.status_code, response.json()["detail"]) == (422, message)
    captured = capfd.readouterr()
    assert "secret" not in captured.out + captured.err + caplog.text + response.text


@pytest.mark.parametrize(
    ("route", "body", "status"),
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
def test_invalid_calls_get_4xx(server: RunningServer, route: str, body: Any, status: int) -> None:
    """Unknown functions, invalid sessions and invalid arguments are errors of the client."""
    response = server.post(f"{API}/{route}", body)
    assert response.status_code == status
    assert response.json().keys() <= {"detail", "error"}


def test_other_content_types_are_rejected(server: RunningServer) -> None:
    """Browsers let scripts of other sites send these content types without a CORS preflight."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        response = httpx.post(
            f"{server.url}{API}/run/fill",
            content=b'{"data": ["[MASK]", 5, ""]}',
            headers={"Content-Type": content_type},
        )
        assert response.status_code == 415
    response = httpx.post(
        f"{server.url}{API}/run/fill", content=b"{", headers={"Content-Type": "application/json"}
    )
    assert (response.status_code, response.json()["detail"]) == (422, "the body is not JSON")


def test_event_data_selects_a_head(
    server: RunningServer, dependencies: list[dict[str, Any]]
) -> None:
    """Event data must be two integers; layers out of range are clipped."""
    index = index_of(dependencies, 3, "chosen")
    data = ["plain", SENTENCES[0], ""]
    for event in (None, {}, {"layer": 1}, {"layer": 1, "head": {}}, {"layer": "1", "head": 1}):
        body = {"data": data, "fn_index": index, "session_hash": "b", "event_data": event}
        assert server.post(f"{API}/queue/join", body).status_code == 422
    for layer in (-9, 99):
        body["event_data"] = {"layer": layer, "head": 1}
        server.post(f"{API}/queue/join", body)
        completed, _ = read_messages(server, "b")
        assert completed["success"], completed
        assert f"Layer {1 if layer < 0 else 2}, head 1" in completed["output"]["data"][2]


def test_calls_by_name(server: RunningServer) -> None:
    """Programs call a function directly, or queue the call and read its result."""
    body = {"data": [f"the [MASK] {SENTENCES[0]}", 2, ""]}
    direct = server.post(f"{API}/run/fill", body).json()["data"]
    assert len(direct[0][0]["predictions"]) == 2
    event = server.post(f"{API}/call/fill", body).json()["event_id"]
    text = httpx.get(f"{server.url}{API}/call/fill/{event}", timeout=60).text
    assert text.startswith("event: complete\ndata: ")
    assert json.loads(text.removeprefix("event: complete\ndata: ")) == direct
    event = server.post(f"{API}/call/v2/fill", {"text": body["data"][0], "top": 2}).json()
    text = httpx.get(f"{server.url}{API}/call/fill/{event['event_id']}", timeout=60).text
    assert json.loads(text.removeprefix("event: complete\ndata: ")) == direct
    for keywords in ({"top": 2}, {"text": "a", "other": 1}, {"text": file_data(__file__)}):
        assert server.post(f"{API}/call/v2/fill", keywords).status_code == 422
    event = server.post(f"{API}/call/fill", {"data": ["no mask", 2, ""]}).json()["event_id"]
    text = httpx.get(f"{server.url}{API}/call/fill/{event}", timeout=60).text
    assert text.startswith("event: error\ndata: ")
    assert "no [MASK]" in text


def test_stream_without_pending_calls_ends(server: RunningServer) -> None:
    """Clients cannot keep idle connections open."""
    assert httpx.get(f"{server.url}{API}/heartbeat/a").status_code == 404
    assert [message["msg"] for message in read_messages(server, "unknown")] == ["close_stream"]


def test_stream_ends_if_the_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending a message times out after ``_SEND_SECONDS``."""

    async def content() -> AsyncIterator[bytes]:
        yield b"a message"

    async def send_forever(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("bertsmith.serve.page.calls._SEND_SECONDS", 0.0)
    asyncio.run(_Stream(content()).stream_response(send_forever))


def test_all_routes_share_the_queue_limit() -> None:
    """A full queue rejects calls by the page and by programs."""
    resume = threading.Event()
    function = SimpleNamespace(
        fn=resume.wait,
        inputs=[],
        outputs=[None],
        api_name="wait",
        api_visibility="public",
        collects_event_data=False,
    )

    async def scenario() -> None:
        jobs = JobQueue(max_pending=2)
        app = Starlette(routes=CallRoutes(SimpleNamespace(fns={0: function}), jobs).routes())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"data": [], "fn_index": 0, "session_hash": "a"}
            first = await client.post(f"{API}/queue/join", json=body)
            second = asyncio.create_task(client.post(f"{API}/run/wait", json={"data": []}))
            await wait_until(lambda: jobs.num_pending == 2)
            for route in ("queue/join", "run/wait", "call/wait"):
                response = await client.post(f"{API}/{route}", json=body)
                assert response.status_code == 503
                assert response.headers["retry-after"] == "1"
            resume.set()
            assert (await second).json() == {"data": [True]}
            assert first.status_code == 200
        jobs.close()

    async def scenario_with_timeout() -> None:
        async with asyncio.timeout(60):
            await scenario()

    try:
        asyncio.run(scenario_with_timeout())
    finally:
        resume.set()


def test_only_an_allow_list_of_gradio_is_served(server: RunningServer) -> None:
    """Paths that the page needs accept GET only; all other paths of Gradio are 404."""
    for path in ("/", "/config", f"{API}/info", "/theme.css", "/manifest.json"):
        assert httpx.get(server.url + path).status_code == 200, path
        assert httpx.post(server.url + path).status_code == 405, path
    for path in (
        f"{API}/upload",
        f"{API}/file={__file__}",
        f"{API}/component_server",
        f"{API}/reset",
        f"{API}/cancel",
        f"{API}/vibe-code",
        f"{API}/openapi.json",
        f"{API}/startup-events",
        "/monitoring",
        "/svelte/index.js",
        "/login",
        "/nowhere",
    ):
        for method in ("GET", "POST"):
            response = server._client.request(method, server.url + path)
            assert response.status_code == 404, path
            assert response.json()["error"]["code"] == 404
    assert httpx.get(f"{server.url}/assets/..%2f..%2f..%2froutes.py").status_code in (403, 404)


def test_request_headers_do_not_change_the_page(server: RunningServer) -> None:
    """The page contains neither Host nor X-Forwarded-Host; the browser computes the root URL."""
    pages = {path: httpx.get(server.url + path).text for path in ("/", "/config", f"{API}/info")}
    for name in ("Host", "X-Forwarded-Host", "X-Gradio-Server", "X-Forwarded-Proto"):
        for path, text in pages.items():
            response = server._client.get(server.url + path, headers={name: "evil.example"})
            assert response.text == text
    assert httpx.get(f"{server.url}/?deep_link=a&page=b").text == pages["/"]
    assert json.loads(pages["/config"])["root"] == ""
    assert re.search(r'"root":new URL\("\."', pages["/"])


def test_page_has_a_content_security_policy(server: RunningServer) -> None:
    """It allows the page's own scripts, and no connections to other hosts."""
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
