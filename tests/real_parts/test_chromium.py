from pathlib import Path

from tests.real_parts.chromium import opened, screenshot, shown

PAGE = (
    "<html><body><p id=figure></p>"
    "<script>figure.textContent = 6 * 7 + ' figures'; nothing.at_all</script></body></html>"
)


def page(folder: Path) -> str:
    file = folder / "page.html"
    file.write_text(PAGE)
    return file.as_uri()


def test_the_document_includes_changes_by_its_scripts(tmp_path: Path) -> None:
    assert '<p id="figure">42 figures</p>' in shown(page(tmp_path), "42 figures")


def test_an_error_of_a_script_is_a_problem(tmp_path: Path) -> None:
    with opened(page(tmp_path)) as there:
        assert there.html("42 figures")
        assert any("nothing is not defined" in problem for problem in there.problems)


def test_a_screenshot_is_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    screenshot(page(tmp_path), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
