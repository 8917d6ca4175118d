"""The web page of a server with an API key, for which the page asks."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from tests.serve.browsing import (
    browser,
    needs_browser,
    open_tab,
    read_bars,
    submit_form,
    wait_for_result,
)
from tests.serve.model_server import SENTENCES, RunningServer, run_server

__all__ = ["browser"]

KEY = "offen, Sésam: öffne"


@pytest.fixture(scope="module")
def protected_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with an API key and a page, which answers wrong keys without delay."""

    async def skip_delay(_: float) -> None:
        pass

    with run_server(models[:1], key=KEY, has_page=True, sleep=skip_delay) as server:
        yield server


@needs_browser
def test_page_asks_for_the_key(browser: Any, protected_server: RunningServer) -> None:
    """A wrong key is an error; with the key the page works, also after it is reloaded."""
    page = browser.new_context().new_page()
    page.goto(protected_server.url)
    field = page.get_by_label("This server needs an API key")
    assert page.get_by_role("tab").count() == 0
    field.fill("wrong")
    field.press("Enter")
    page.get_by_role("alert").filter(has_text="The API key is wrong.").wait_for()
    page.get_by_label("This server needs an API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    wait_for_result(page.get_by_role("tabpanel"))
    page.reload()
    text = SENTENCES[0].replace("smith", "[MASK]")
    result = submit_form(open_tab(page, "Fill in"), "Fill in", {"Text with [MASK]": text})
    assert len(read_bars(result)) > 3
    page.context.close()


@needs_browser
def test_key_is_kept_for_one_browser_tab_only(
    browser: Any, protected_server: RunningServer
) -> None:
    """The key is neither in the address nor in copied commands, and another tab asks again."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = context.new_page()
    page.goto(protected_server.url)
    page.get_by_label("This server needs an API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    result = wait_for_result(page.get_by_role("tabpanel"))
    assert "Sésam" not in page.evaluate("decodeURIComponent(location.href)")
    for index in (0, 1):
        result.locator(".answered button").nth(index).click()
        result.locator(".answered button").nth(index).filter(has_text="Copied").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert "BERTSMITH_API_KEY" in copied
        assert "Sésam" not in copied
    other = context.new_page()
    other.goto(protected_server.url)
    other.get_by_label("This server needs an API key").wait_for()
    context.close()


def test_only_the_files_of_the_page_need_no_key(protected_server: RunningServer) -> None:
    """The page itself can be loaded without the key; everything else is 401."""
    index = httpx.get(protected_server.url)
    assert index.status_code == 200
    script = index.text.partition('src="')[2].partition('"')[0]
    assert httpx.get(f"{protected_server.url}/{script}").status_code == 200
    assert httpx.post(protected_server.url).status_code == 401
    for path in ("/models", "/docs", "/metrics", "/openapi.json", "/v1/models", "/page", "//"):
        assert httpx.get(protected_server.url + path).status_code == 401, path


def test_only_browsers_are_asked_for_a_password(protected_server: RunningServer) -> None:
    """Requests for HTML get a Basic challenge, others a Bearer challenge."""
    for accept, challenge in (
        ("text/html,*/*;q=0.8", "Basic realm="),
        ("application/json", "Bearer"),
    ):
        response = httpx.get(f"{protected_server.url}/docs", headers={"Accept": accept})
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith(challenge)
    assert httpx.get(f"{protected_server.url}/health").status_code == 200


def test_password_is_the_api_key(protected_server: RunningServer) -> None:
    """Any user name is accepted; a wrong password or a malformed header is not."""
    url = f"{protected_server.url}/models"
    assert httpx.get(url, auth=("", KEY.encode())).status_code == 200
    assert httpx.get(url, auth=("anybody", KEY.encode())).status_code == 200
    header = {b"Authorization": b"Bearer " + KEY.encode()}
    assert httpx.get(url, headers=header).status_code == 200
    for password in ("", KEY[:-1], KEY + "x"):
        assert httpx.get(url, auth=("me", password.encode())).status_code == 401
    for value in (b"Basic", b"Basic !!", b"Basic " + KEY.encode(), b"basic bWU="):
        assert httpx.get(url, headers={b"Authorization": value}).status_code == 401


def test_password_does_not_work_for_other_sites(protected_server: RunningServer) -> None:
    """Browsers attach the password to requests of other sites; these are rejected (CSRF)."""
    netloc = protected_server.url.removeprefix("http://")
    for headers, status in (
        ({"Sec-Fetch-Site": "cross-site"}, 401),
        ({"Sec-Fetch-Site": "same-site"}, 401),
        ({"Sec-Fetch-Site": "unknown-value"}, 401),
        (
            {
                "Sec-Fetch-Site": "cross-site",
                "Sec-Fetch-Mode": "navigate",
                "Sec-Fetch-Dest": "document",
            },
            401,
        ),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        # Without HTTPS, and in older browsers, there is only the Origin header.
        ({"Origin": "http://page.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"Origin": "http://["}, 401),
        ({"Origin": f"http://{netloc.partition(':')[0]}:1"}, 401),
        ({"Origin": f"http://{netloc}"}, 200),
    ):
        response = httpx.post(
            f"{protected_server.url}/embed",
            json={"inputs": "a"},
            auth=("me", KEY.encode()),
            headers=headers,
        )
        assert response.status_code == status, headers


@needs_browser
def test_links_from_other_sites_open_the_documentation(
    browser: Any, protected_server: RunningServer
) -> None:
    """Navigation from another site is allowed, because that site cannot read the page."""
    context = browser.new_context(http_credentials={"username": "me", "password": KEY})
    page = context.new_page()
    # Another host name of this machine is another site.
    link = f"<a href={protected_server.url}/docs>link</a>"
    page.route(
        "http://localhost:1/", lambda route: route.fulfill(content_type="text/html", body=link)
    )
    page.goto("http://localhost:1/")
    page.get_by_text("link").click()
    page.get_by_role("heading", name="Endpoints").wait_for()
    context.close()
