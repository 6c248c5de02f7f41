"""Who may use the API: tokens, names of hosts, headers for browsers, and the gate of queries."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from playwright.sync_api import Browser, Page

from agent.catalog.engine_states import ProbedState
from agent.outputs.api.middleware import Message, QueryGate
from agent.records.engine import EngineStatus
from agent.settings.access import AccessPolicy, TokenFile, known_hosts
from tests.outputs.api.serving import WITHIN_S, Api, open_api
from tests.real_parts.chromium import WITHIN_MS, grave, opened_in, overflow
from tests.records.making import NOON, objective, record

TOKEN = "token-of-the-test"

CLOSED = (
    *("/metrics", "/api/v1/summary", "/api/v1/requests", "/api/v1/engines", "/api/v1/nothing"),
    *("/nothing", "//api/v1/summary", "/runbooks"),
)
OPEN = (
    *("/", "/docs", "/docs/api", "/docs/cost.md", "/openapi.json", "/healthz", "/readyz"),
    *("/runbooks/README.md", "/engines/chat-0/livez", "/engines/chat-0/readyz"),
)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("locked")
    (folder / "tokens").write_text(TOKEN)
    access = AccessPolicy(tokens=TokenFile("security.read_tokens", folder / "tokens"))
    with open_api(folder, access=access) as api:
        api.store([record(1, ended_at=api.agent.now - 1)], [objective()])
        idle = EngineStatus(state=ProbedState.IDLE, since=NOON, read_at=NOON)
        api.agent.states = {"chat-0": idle}
        yield api


def get(api: Api, path: str, **headers: str) -> requests.Response:
    return requests.get(
        f"{api.url}{path}", headers=headers, timeout=WITHIN_S, allow_redirects=False
    )


@pytest.mark.parametrize("path", [*CLOSED, *OPEN])
def test_without_a_token_nothing_is_told_and_browsers_are_restricted(
    locked: Api, path: str
) -> None:
    for token, allowed in (("", False), (f"{TOKEN}x", False), (TOKEN, True)):
        found = get(locked, path, **({"Authorization": f"Bearer {token}"} if token else {}))
        if path in OPEN:
            assert found.status_code == 200
        elif allowed:
            assert found.status_code != 401
        else:
            assert (found.status_code, found.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert found.json()["detail"].startswith("send a valid token")
        assert found.headers["X-Content-Type-Options"] == "nosniff"
        assert found.headers["X-Frame-Options"] == "DENY"
        policy = found.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert ("script-src" in policy) is (path in ("/", "/docs/api"))


def test_a_page_of_another_site_reaches_nothing_by_its_own_name(tmp_path: Path) -> None:
    with open_api(
        tmp_path, access=AccessPolicy(known_hosts("127.0.0.1", ["goodput.example.org"]))
    ) as api:
        port = api.url.rpartition(":")[2]
        for path in (*CLOSED, *OPEN):
            refused = get(api, path, Host=f"evil.example:{port}")
            assert refused.status_code == 421, path
            assert refused.headers["Content-Type"] == "application/problem+json"
            assert refused.json()["title"] == "Misdirected Request"
        for host in (f"localhost:{port}", "goodput.example.org", f"127.0.0.1:{port}"):
            assert get(api, "/api/v1/summary", Host=host).status_code == 200


# The gate of queries, before an application that responds when the test lets it.

PATH = "/api/v1/summary"


class Application:
    """An ASGI application whose response has two parts and waits for the test."""

    def __init__(self, *, begins: bool = False) -> None:
        self.go_on = asyncio.Event()
        self.calls = self.ended = 0
        self._begins = begins

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.calls += 1
        if not self._begins:
            await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await self.go_on.wait()
        await send({"type": "http.response.body", "body": b"there"})
        self.ended += 1


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def asked(gate: QueryGate, path: str = PATH) -> tuple[int, str]:
    """The status of a response, and the text or the sentence of it."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await gate({"type": "http", "path": path}, _nothing, send)
    start, *parts = sent
    assert [message["type"] for message in sent].count("http.response.start") == 1
    body = b"".join(part["body"] for part in parts).decode()
    return start["status"], json.loads(body)["detail"] if start["status"] == 503 else body


def test_a_query_that_is_too_late_is_refused_once_but_no_response_that_has_begun() -> None:
    async def scenario() -> None:
        application = Application()
        late = await asked(QueryGate(application, within_s=0.01))
        assert late == (503, "the database did not answer in time; ask again in a moment")
        # The query ends later, without a second response.
        application.go_on.set()
        while not application.ended:
            await asyncio.sleep(0)
        begun = Application(begins=True)
        asyncio.get_running_loop().call_later(0.05, begun.go_on.set)
        assert await asked(QueryGate(begun, within_s=0.01)) == (200, "there")

    asyncio.run(scenario())


def test_no_more_queries_run_than_may_and_other_paths_have_no_limit() -> None:
    async def scenario() -> None:
        application = Application()
        gate = QueryGate(application, within_s=60, most=2)
        running = [asyncio.create_task(asked(gate)) for _ in range(2)]
        while application.calls < 2:
            await asyncio.sleep(0)
        status, sentence = await asked(gate)
        assert (status, application.calls) == (503, 2)
        assert "ask again" in sentence
        health = asyncio.create_task(asked(gate, "/healthz"))
        while application.calls < 3:
            await asyncio.sleep(0)
        application.go_on.set()
        assert await asyncio.gather(*running, health) == [(200, "there")] * 3
        assert await asked(gate) == (200, "there")

    asyncio.run(scenario())


def test_a_failure_of_a_query_goes_on_to_the_server() -> None:
    async def failing(_scope: Any, _receive: Any, _send: Any) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        asyncio.run(asked(QueryGate(failing, within_s=60)))


# In a browser: each page has cookies and storage of its own


def test_the_page_shows_figures_to_who_has_a_token_alone(browser: Browser, locked: Api) -> None:
    refused = "The agent refuses this token"
    for address in ("/", "/#token=wrong"):
        with opened_in(browser, f"{locked.url}{address}") as there:
            page = there.html(refused if "wrong" in address else "security.read_tokens")
            assert "<dd>" not in page
            assert "<td" not in page
            sign_in(there.page, "another")
            there.page.get_by_role("alert").filter(has_text=refused).wait_for()
            sign_in(there.page, TOKEN)
            assert "<dt>Goodput</dt>" in there.html("Why requests missed")
            assert there.page.get_by_role("alert").count() == 0


def sign_in(page: Page, token: str) -> None:
    page.get_by_label("security.read_tokens").fill(token)
    page.get_by_role("button", name="Show the figures").click()


def test_a_token_in_the_address_opens_the_view_of_the_address(
    browser: Browser, locked: Api
) -> None:
    with opened_in(browser, f"{locked.url}/#token={TOKEN}") as there:
        page = there.html("Why requests missed")
        assert TOKEN not in there.page.url
        assert TOKEN not in page
        assert "<dt>Goodput</dt>" in page
        there.page.goto(f"{locked.url}/#requests?verdict=missed&token={TOKEN}")
        there.html("Requests that began in the last")
        assert there.page.url.endswith("/#requests?verdict=missed")


def test_one_login_is_for_all_tabs_until_one_signs_out(browser: Browser, locked: Api) -> None:
    context = browser.new_context()
    context.set_default_timeout(WITHIN_MS)
    first, second, third = (context.new_page() for _ in range(3))
    for page in (first, second):
        page.goto(locked.url)
        page.get_by_text("security.read_tokens").wait_for()
    sign_in(first, TOKEN)
    second.get_by_text("Why requests missed").wait_for()
    third.goto(f"{locked.url}/#cost")
    third.get_by_role("heading", name="Cost, last hour").wait_for()
    first.get_by_role("button", name="Sign out").click()
    for page in (first, second, third):
        page.get_by_text("security.read_tokens").wait_for()
    context.close()


def test_the_api_page_tries_a_query_with_the_token_of_the_login(
    browser: Browser, locked: Api
) -> None:
    with opened_in(browser, f"{locked.url}/#token={TOKEN}") as there:
        there.html("Why requests missed")
        there.page.goto(f"{locked.url}/docs/api")
        there.page.get_by_text("/api/v1/summary").first.wait_for()
        assert grave(there) == overflow(there) == []
        there.page.get_by_role("button", name="/api/v1/summary", exact=False).first.click()
        there.page.get_by_role("button", name="Execute").click()
        response = there.page.locator(".live-responses-table")
        response.get_by_text('"requests"').first.wait_for()
        assert response.get_by_text("200").count() > 0
        assert grave(there) == []
        there.page.set_viewport_size({"width": 390, "height": 800})
        assert overflow(there) == []
        there.page.emulate_media(color_scheme="dark")
        there.page.locator("html.dark-mode").wait_for()
        assert grave(there) == []
        assert there.problems == []
