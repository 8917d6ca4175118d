"""The page of a server with a key: visitors give it to their browser as a password.

These tests never go through the key of other clients: tests/serve/test_admission.py does.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from tests.serve.model_server import TEXT, RunningServer, run_server

pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")

from bertsmith.serve.page import mount
from tests.serve.browsing import ask, bars, browser, go, needs_browser, opened, sync_api

__all__ = ["browser"]

KEY = "offen, Sésam: öffne"


@pytest.fixture(scope="module")
def locked(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with a key and a page."""
    with run_server(models[:1], key=KEY, page=mount) as own:
        yield own


@needs_browser
def test_a_visitor_gives_the_key_once(browser: Any, locked: RunningServer) -> None:
    """Then the whole page works: its scripts, its questions, and the answers that stream."""
    own = {"username": "me", "password": KEY}
    page = opened(browser, locked.url, http_credentials=own)
    text = TEXT[0].replace("smith", "[MASK]")
    result = ask(go(page, "Fill in"), "Fill in", {"Text with [MASK]": text})
    assert len(bars(result)) > 3


@needs_browser
@pytest.mark.parametrize("more", [{}, {"http_credentials": {"username": "me", "password": "no"}}])
def test_nobody_else_sees_the_page(
    browser: Any, locked: RunningServer, more: dict[str, Any]
) -> None:
    """Without the key, or with another one, the browser gets nothing of it."""
    page = browser.new_context(**more).new_page()
    refused: list[int] = []
    page.on("response", lambda found: refused.append(found.status))
    # Where nobody gives a password, the browser has no page to show.
    with nullcontext() if more else pytest.raises(sync_api.Error, match="INVALID_AUTH"):
        page.goto(locked.url)
    assert set(refused) == {401}


def test_a_browser_is_asked_for_a_password(locked: RunningServer) -> None:
    """It says that it wants a page; others are told of the header."""
    for accept, way in (("text/html,*/*;q=0.8", "Basic realm="), ("application/json", "Bearer")):
        found = httpx.get(locked.url, headers={"Accept": accept})
        assert found.status_code == 401
        assert found.headers["www-authenticate"].startswith(way)
    assert httpx.get(f"{locked.url}/health").status_code == 200


def test_the_password_is_the_key(locked: RunningServer) -> None:
    """Whatever the name; not what begins so, nor what is no password at all."""
    way = f"{locked.url}/models"
    assert httpx.get(way, auth=("", KEY.encode())).status_code == 200
    assert httpx.get(way, auth=("anybody", KEY.encode())).status_code == 200
    header = {b"Authorization": b"Bearer " + KEY.encode()}
    assert httpx.get(way, headers=header).status_code == 200
    for password in ("", KEY[:-1], KEY + "x"):
        assert httpx.get(way, auth=("me", password.encode())).status_code == 401
    for words in (b"Basic", b"Basic !!", b"Basic " + KEY.encode(), b"basic bWU="):
        assert httpx.get(way, headers={b"Authorization": words}).status_code == 401


def test_another_sites_page_cannot_use_it(locked: RunningServer) -> None:
    """A browser sends the password by itself, whoever's page asks; only our own is answered."""
    here = locked.url.removeprefix("http://")
    for own, status in (
        ({"Sec-Fetch-Site": "cross-site"}, 401),
        ({"Sec-Fetch-Site": "same-site"}, 401),
        ({"Sec-Fetch-Site": "of-tomorrow"}, 401),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate",
          "Sec-Fetch-Dest": "document"}, 401),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        # Without https, and in older browsers, there is the origin alone.
        ({"Origin": "http://page.example"}, 401),
        ({"Origin": "null"}, 401),
        ({"Origin": f"http://{here.partition(':')[0]}:1"}, 401),
        ({"Origin": f"http://{here}"}, 200),
    ):  # fmt: skip
        found = httpx.post(
            f"{locked.url}/embed", json={"inputs": "a"}, auth=("me", KEY.encode()), headers=own
        )
        assert found.status_code == status, own


@needs_browser
def test_a_link_leads_to_the_page(browser: Any, locked: RunningServer) -> None:
    """Also one of another site, whose page does not see ours."""
    context = browser.new_context(http_credentials={"username": "me", "password": KEY})
    page = context.new_page()
    # Another name of this machine is another site.
    page.route("http://localhost:1/", lambda own: own.fulfill(
        content_type="text/html", body=f"<a href={locked.url}>there</a>"))  # fmt: skip
    page.goto("http://localhost:1/")
    page.get_by_text("there").click()
    page.get_by_role("tab").first.wait_for()
