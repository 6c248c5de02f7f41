"""Runbooks and documentation as pages: links work, and labels of an alert are filled in."""

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import urljoin

import pytest
import requests
from playwright.sync_api import Browser

from agent.outputs.web.documents import documents, html_document, known_labels
from tests.outputs.api.serving import WITHIN_S, Api, open_api
from tests.real_parts.chromium import Scheme, grave, opened_in, overflow

_TARGET = re.compile(r'(?:href|src)="([^"]+)"')
HOSTILE = '"><img src=x onerror=alert(1)>\\'


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(tmp_path_factory.mktemp("documents")) as running:
        yield running


def read(api: Api, path: str) -> str:
    """What a browser gets."""
    accepted = {"Accept": "text/html,*/*;q=0.8"}
    found = requests.get(f"{api.url}{path}", headers=accepted, timeout=WITHIN_S)
    assert found.status_code == 200, path
    return found.text if "text/html" in found.headers["Content-Type"] else ""


def test_every_link_leads_to_a_page_and_an_anchor_of_this_agent(api: Api) -> None:
    pages: dict[str, str] = {}
    waiting, anchors = ["/docs", "/runbooks/README.md"], set()
    while waiting:
        path = waiting.pop()
        if path in pages:
            continue
        pages[path] = read(api, path)
        for target in map(unescape, _TARGET.findall(pages[path])):
            if re.match(r"https?:", target):
                continue
            assert not target.startswith("..")
            file, _, anchor = urljoin(path, target).partition("#")
            waiting.append(file)
            if anchor and file.startswith(("/docs/", "/runbooks/")) and file != "/docs/api":
                anchors.add((file, anchor))
    assert sum(path.startswith("/runbooks/") for path in pages) > 70
    assert sum(path.startswith("/docs/") for path in pages) > 40
    for file, anchor in anchors:
        assert f'id="{anchor}"' in pages[file], (file, anchor)


@pytest.mark.parametrize(
    "name", ["nothing.md", "../pyproject.toml", "%2e%2e/README.md", "page.txt"]
)
def test_what_is_no_page_is_refused(api: Api, name: str) -> None:
    response = api.get(f"/docs/{name}")
    assert response.status_code == 404


def test_a_runbook_is_about_the_labels_of_its_alert(browser: Browser, api: Api) -> None:
    url = f"{api.url}/runbooks/LlmObjectiveOutage.md?objective=chat&model=llama"
    with opened_in(browser, url) as there:
        page = there.page
        query = 'llm_slo_requests_total{objective="chat",model="llama"}'
        page.get_by_text(query).wait_for()
        assert "OBJECTIVE" not in page.inner_text("main")
        page.get_by_role("link", name="LlmRequestsFailing").click()
        page.get_by_role("heading", name="LlmRequestsFailing").wait_for()
        assert page.url.endswith("?objective=chat&model=llama")
        page.get_by_role("link", name="Requests", exact=True).click()
        page.get_by_text("Requests that began in the last").first.wait_for()
        assert page.url.endswith("/#requests?objective=chat&model=llama")
        assert there.problems == []


def test_labels_that_are_missing_can_be_entered(browser: Browser, api: Api) -> None:
    with opened_in(browser, f"{api.url}/runbooks/LlmObjectiveOutage.md?objective=chat") as there:
        page = there.page
        page.get_by_label("model").fill('lla"ma')
        page.get_by_role("button", name="Fill in").click()
        page.get_by_text(r'{objective="chat",model="lla\"ma"}').first.wait_for()
        assert page.get_by_role("button", name="Fill in").count() == 0
        assert there.problems == []


SCREENS: tuple[tuple[Scheme, int], ...] = (("light", 1400), ("dark", 390))


@pytest.mark.parametrize("path", ["/docs", "/docs/cost.md", "/runbooks/LlmQueueDeep.md"])
def test_everybody_can_read_a_page(browser: Browser, api: Api, path: str) -> None:
    for scheme, width in SCREENS:
        with opened_in(browser, f"{api.url}{path}", scheme=scheme, width=width) as there:
            there.page.locator("h1").wait_for()
            assert grave(there) == []
            assert overflow(there) == []
            assert there.problems == []


def test_labels_of_strangers_are_text(tmp_path: Path) -> None:
    labels = known_labels({"engine": HOSTILE, "other": "x", "model": ""})
    assert labels.keys() == {"engine"}
    text = documents().markdown("runbooks/LlmEngineHanging.md")
    assert text is not None
    page = html_document("runbooks/LlmEngineHanging.md", text, labels)
    assert "<img" not in page
    assert r"{engine=&quot;\&quot;&gt;&lt;img src=x onerror=alert(1)&gt;\\&quot;}" in page


def test_html_in_markdown_is_text() -> None:
    assert "<script>" not in html_document("a.md", "# <script>alert(1)</script>\n", {})
