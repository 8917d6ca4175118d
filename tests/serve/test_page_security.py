"""Headers, policies and refused requests of a server with the page."""

from typing import Any

import httpx
import pytest

from bertsmith.serve.hosts import get_allowed_hosts
from bertsmith.serve.models import ServedModel
from bertsmith.serve.page import Page
from tests.serve.browsing import (
    TABS,
    browser,
    needs_browser,
    open_page,
    open_tab,
    page_models,
    page_url,
    wait_for_result,
)
from tests.serve.model_server import RunningServer, run_server

__all__ = ["browser", "page_models", "page_url"]

SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def test_page_forbids_inline_code_and_other_hosts(page_url: str) -> None:
    """Scripts, styles and requests are limited to the server itself; nothing may frame the page."""
    response = httpx.get(page_url)
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in response.headers["content-security-policy"].split(";")
    )
    assert set(policy.values()) == {"'none'", "'self'"}
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert "style=" not in response.text
    assert "<script>" not in response.text
    file = response.text.partition('src="')[2].partition('"')[0]
    for path in ("", f"/{file}", "/models", "/nowhere"):
        headers = httpx.get(page_url + path).headers
        assert SECURITY_HEADERS.items() <= headers.items(), path
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
    # The style of /docs is allowed by its hash, so that no inline style is allowed in general.
    assert "unsafe-inline" not in httpx.get(f"{page_url}/docs").headers["content-security-policy"]


def test_files_are_cached_by_version(page_url: str) -> None:
    """Files never change, because their path has a hash; the page is revalidated."""
    index = httpx.get(page_url)
    assert index.headers["cache-control"] == "no-cache"
    etag = index.headers["etag"]
    assert httpx.get(page_url, headers={"If-None-Match": etag}).status_code == 304
    assert httpx.get(page_url, headers={"If-None-Match": '"old"'}).status_code == 200
    version = etag.strip('"')
    for name, media_type in (
        ("app.js", "text/javascript"),
        ("style.css", "text/css"),
        ("favicon.svg", "image/svg+xml"),
    ):
        assert f"page/{version}/{name}" in index.text
        response = httpx.get(f"{page_url}/page/{version}/{name}")
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert response.headers["content-type"].startswith(media_type)
        assert httpx.head(f"{page_url}/page/{version}/{name}").status_code == 200
    assert httpx.get(f"{page_url}/page/0000/app.js").status_code == 404
    assert httpx.get(f"{page_url}/models").headers["cache-control"] == "no-store"


def test_version_depends_on_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changing one file changes the path of all files."""
    from bertsmith.serve import page

    contents = page._read_files()
    version = Page().version
    for name in contents:
        changed = {**contents, name: contents[name] + b" "}
        monkeypatch.setattr(page, "_read_files", lambda changed=changed: dict(changed))
        assert Page().version != version, name


@needs_browser
def test_page_requests_no_other_hosts(browser: Any, page_url: str) -> None:
    """All requests of all tabs go to the server itself, and no file refers to another host."""
    page = open_page(browser, page_url)
    requested: list[str] = []
    page.context.on("request", lambda request: requested.append(request.url))
    page.on("websocket", lambda socket: requested.append(socket.url))
    page.reload()
    for tab in TABS:
        open_tab(page, tab)
    assert len(requested) > 20
    assert [url for url in requested if not url.startswith(f"{page_url}/")] == []
    for path in {url for url in requested if "/page/" in url}:
        text = httpx.get(path).text.replace("http://www.w3.org/", "")
        assert "http://" not in text, path
        assert "https://" not in text, path
    page.context.close()


#: JavaScript that attempts what an injected script would, and collects policy violations.
ATTACK = """() => {
  window.refused = [];
  document.addEventListener("securitypolicyviolation",
    (event) => window.refused.push(event.effectiveDirective));
  const add = (name, values) =>
    document.body.append(Object.assign(document.createElement(name), values));
  fetch("http://127.0.0.1:1/").catch(() => 0);
  add("img", {src: "http://127.0.0.1:1/"});
  add("iframe", {src: "http://127.0.0.1:1/"});
  add("script", {src: "http://127.0.0.1:1/"});
  add("script", {textContent: "window.hacked = 1"});
  add("link", {rel: "stylesheet", href: "http://127.0.0.1:1/"});
  add("style", {textContent: "body { color: red }"});
  document.body.setAttribute("style", "color: red");
}"""


@needs_browser
def test_content_security_policy_is_enforced(browser: Any, page_url: str) -> None:
    """The page works without violations, and other hosts, inline scripts and styles are blocked."""
    page = browser.new_context().new_page()
    errors: list[str] = []
    page.on("console", lambda line: errors.extend([line.text] if line.type == "error" else []))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(page_url)
    page.get_by_role("tab").first.wait_for()
    for tab in TABS:
        open_tab(page, tab)
    page.get_by_label("layer 2, head 3", exact=True).click()
    page.locator("h3", has_text="Layer 2, head 3").wait_for()
    assert errors == []
    page.evaluate(ATTACK)
    page.wait_for_function("window.refused.length >= 8")
    assert set(page.evaluate("window.refused")) == {
        "connect-src",
        "img-src",
        "frame-src",
        "script-src-elem",
        "style-src-elem",
        "style-src-attr",
    }
    assert page.evaluate("window.hacked") is None
    page.context.close()


#: A file reference as Gradio's clients send it.
FILE_REFERENCE = {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}}


def test_file_references_are_refused(page_url: str) -> None:
    """There are no routes of Gradio, and the endpoints do not accept references to files."""
    for path in (
        "/gradio_api/queue/join",
        "/gradio_api/upload",
        "/gradio_api/call/fill",
        "/gradio_api/run/predict",
        "/run/predict",
        "/queue/join",
    ):
        body = {"data": [FILE_REFERENCE], "fn_index": 0, "session_hash": "a"}
        assert httpx.post(page_url + path, json=body).status_code == 404, path
    for path in (
        "/gradio_api/file=/etc/passwd",
        "/file=/etc/passwd",
        "/gradio_api/proxy=https://a.hf.space/b",
        "/config",
    ):
        assert httpx.get(page_url + path).status_code == 404, path
    for path in (
        "/",
        "/predict",
        "/fill",
        "/embed",
        "/tokenize",
        "/similarity",
        "/attention",
        "/classify",
    ):
        for inputs in (FILE_REFERENCE, [FILE_REFERENCE]):
            response = httpx.post(page_url + path, json={"inputs": inputs})
            assert response.status_code == 422, path
            assert "root:" not in response.text


def test_page_has_no_other_files(page_url: str) -> None:
    """Paths outside the static files are 404, however they are written."""
    version = Page().version
    client = httpx.Client(base_url=page_url)
    for path in (
        f"/page/{version}/",
        f"/page/{version}/index.html",
        f"/page/{version}/../../app.py",
        f"/page/{version}/%2e%2e%2fapp.py",
        f"/page/{version}/..%5capp.py",
        f"/page/{version}//etc/passwd",
        "/page/",
        "/app.js",
    ):
        assert client.get(path).status_code == 404, path
    for method in ("PUT", "DELETE"):
        assert client.request(method, "/").status_code == 405


def test_hostile_hosts_are_refused(page_models: list[ServedModel]) -> None:
    """A name of an attacker that resolves to this machine gets neither the page nor results."""
    hosts = get_allowed_hosts("127.0.0.1", "127.0.0.1", ())
    with run_server(page_models[:1], has_page=True, hosts=hosts) as server:
        for name in (
            "attacker.example",
            "127.0.0.1.attacker.example",
            "localhost@attacker.example",
        ):
            headers = {"Host": name}
            for path in ("/", f"/page/{Page().version}/app.js", "/models"):
                assert httpx.get(server.url + path, headers=headers).status_code == 400, (
                    name,
                    path,
                )
            response = server.post("/embed", {"inputs": "a"}, headers=headers)
            assert response.status_code == 400, name
        assert httpx.get(server.url).status_code == 200


ORIGIN = "http://other.example"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_of_other_sites_are_refused(page_models: list[ServedModel], site: str) -> None:
    """They get 403 unless --cors names their origin, also if the browser sends no preflight."""
    headers = {"Origin": ORIGIN, "Sec-Fetch-Site": site, "Content-Type": "application/json"}
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }

    def send(server: RunningServer, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{server.url}/embed", content=b'{"inputs": "a"}', headers=headers)

    with run_server(page_models[:1], has_page=True) as server:
        response = send(server, headers)
        assert response.status_code == 403
        assert "--cors" in response.json()["error"]["message"]
        assert "access-control-allow-origin" not in response.headers
        response = httpx.options(f"{server.url}/embed", headers=preflight)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
        for same in ("same-origin", "none"):
            assert send(server, headers | {"Sec-Fetch-Site": same}).status_code == 200
    with run_server(page_models[:1], has_page=True, origins=[ORIGIN]) as server:
        assert send(server, headers).status_code == 200
        other = headers | {"Origin": "http://third.example"}
        assert send(server, other).status_code == 403
        assert httpx.options(f"{server.url}/embed", headers=preflight).status_code == 200


@needs_browser
def test_browsers_of_visitors_of_other_sites_are_refused(
    browser: Any, page_models: list[ServedModel]
) -> None:
    """A page of another site makes the browser send a request; the server does not compute it."""
    with run_server(page_models[:1], has_page=True) as server:
        page = browser.new_context().new_page()
        html = {"content_type": "text/html", "body": "<h1>other site</h1>"}
        page.route("http://localhost:1/", lambda route: route.fulfill(**html))
        page.goto("http://localhost:1/")
        page.evaluate(
            "url => fetch(url, {method: 'POST', mode: 'no-cors', body: '{\"inputs\": \"a\"}',"
            " headers: {'Content-Type': 'text/plain;json'}}).catch(() => 0)",
            f"{server.url}/embed",
        )
        metrics = httpx.get(f"{server.url}/metrics").text
        assert 'endpoint="/embed",status="200"' not in metrics
        page.goto(server.url)
        wait_for_result(page.get_by_role("tabpanel"))
        page.context.close()
