from pathlib import Path

from tests.real_parts.chromium import dump_dom, screenshot

PAGE = "<html><body><p id=figure></p><script>figure.textContent = 6 * 7</script></body></html>"


def page(folder: Path) -> str:
    file = folder / "page.html"
    file.write_text(PAGE)
    return file.as_uri()


def test_the_document_includes_changes_by_its_scripts(tmp_path: Path) -> None:
    assert '<p id="figure">42</p>' in dump_dom(page(tmp_path))


def test_a_screenshot_is_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "page.png"
    screenshot(page(tmp_path), picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
