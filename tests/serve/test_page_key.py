"""The web page of a server with an API key, which browsers send as a password."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from tests.serve.model_server import SENTENCES, RunningServer, run_server

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from bertsmith.serve.page import mount
from tests.serve.browsing import (
    browser,
    needs_browser,
    open_page,
    open_tab,
    read_bars,
    submit_form,
    sync_api,
)

__all__ = ["browser"]

KEY = "offen, Sésam: öffne"


@pytest.fixture(scope="module")
def protected_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with an API key and a page."""
    with run_server(models[:1], key=KEY, mount_page=mount) as server:
        yield server


@needs_browser
def test_page_works_with_the_password(browser: Any, protected_server: RunningServer) -> None:
    """With the key as password, scripts, calls and event streams of the page work."""
    credentials = {"username": "me", "password": KEY}
    page = open_page(browser, protected_server.url, http_credentials=credentials)
    text = SENTENCES[0].replace("smith", "[MASK]")
    result = submit_form(open_tab(page, "Fill in"), "Fill in", {"Text with [MASK]": text})
    assert len(read_bars(result)) > 3


@needs_browser
@pytest.mark.parametrize(
    "options", [{}, {"http_credentials": {"username": "me", "password": "no"}}]
)
def test_page_is_hidden_without_the_password(
    browser: Any, protected_server: RunningServer, options: dict[str, Any]
) -> None:
    """Without a password, or with a wrong one, every response is 401."""
    page = browser.new_context(**options).new_page()
    statuses: list[int] = []
    page.on("response", lambda response: statuses.append(response.status))
    # Without credentials, Chromium raises an error instead of showing the response.
    with nullcontext() if options else pytest.raises(sync_api.Error, match="INVALID_AUTH"):
        page.goto(protected_server.url)
    assert set(statuses) == {401}


def test_only_browsers_are_asked_for_a_password(protected_server: RunningServer) -> None:
    """Requests for HTML get a Basic challenge, others a Bearer challenge."""
    for accept, challenge in (
        ("text/html,*/*;q=0.8", "Basic realm="),
        ("application/json", "Bearer"),
    ):
        response = httpx.get(protected_server.url, headers={"Accept": accept})
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
def test_links_from_other_sites_open_the_page(
    browser: Any, protected_server: RunningServer
) -> None:
    """Navigation from another site is allowed, because that site cannot read the page."""
    context = browser.new_context(http_credentials={"username": "me", "password": KEY})
    page = context.new_page()
    # Another host name of this machine is another site.
    page.route(
        "http://localhost:1/",
        lambda route: route.fulfill(
            content_type="text/html", body=f"<a href={protected_server.url}>link</a>"
        ),
    )
    page.goto("http://localhost:1/")
    page.get_by_text("link").click()
    page.get_by_role("tab").first.wait_for()
