from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.real_parts.chromium import browsing, opened_in

PAGE = (
    "<html><body><p id=figure></p>"
    "<script>figure.textContent = 6 * 7 + ' figures'; nothing.at_all</script></body></html>"
)


def page(folder: Path) -> str:
    file = folder / "page.html"
    file.write_text(PAGE)
    return file.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as running:
        yield running


def test_the_document_includes_changes_by_scripts_and_an_error_of_one_is_a_problem(
    browser: Browser, tmp_path: Path
) -> None:
    with opened_in(browser, page(tmp_path)) as there:
        assert '<p id="figure">42 figures</p>' in there.html("42 figures")
        assert any("nothing is not defined" in problem for problem in there.problems)


def test_a_page_has_nothing_of_the_one_before_it(browser: Browser, tmp_path: Path) -> None:
    url = page(tmp_path)
    with opened_in(browser, url, scheme="dark", width=380) as before:
        before.page.evaluate("sessionStorage.a = localStorage.a = 1")
        before.page.route("**/*", lambda route: route.abort())
    with opened_in(browser, url) as there:
        assert there.html("42 figures")
        assert len(there.problems) == 1
        assert there.page.evaluate("[sessionStorage.length, localStorage.length]") == [0, 0]
        assert there.page.evaluate(
            "[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]"
        ) == [1280, False]
