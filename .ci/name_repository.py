"""Names the repository in what is released of it: links, URLs of projects, the chart's image.

Usage: name_repository.py SOURCE URL TAG. SOURCE is a copy of the repository, which is changed; URL
is that of the repository on GitHub. It needs the standard library alone.
"""

import re
import sys
from pathlib import Path

# A link or an image whose target is in the repository.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
_PAGES = ("README.md", "CHANGELOG.md", "plugins/vllm/README.md")
_PROJECTS = ("pyproject.toml", "plugins/vllm/pyproject.toml")
_CHART = "deploy/helm/goodput-agent"
_IMAGE = "  # A registry of yours: no image is published yet.\n  repository: goodput-agent\n"
_IMAGE_ROW = '| `"goodput-agent"` | A registry of yours: no image is published yet. |'


def absolute(text: str, folder: str, url: str, tag: str) -> str:
    """The text with links that work outside of the repository; it lies in `folder` there."""

    def link(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        path = _normal(f"{folder}/{target}" if folder else target)
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/{tag}/{path})"

    # Twice: an image may be the text of a link.
    return _LINK.sub(link, _LINK.sub(link, text))


def _normal(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def project_urls(url: str, tag: str) -> str:
    """The table for pyproject.toml."""
    pages = {
        "Homepage": url,
        "Documentation": f"{url}/blob/{tag}/docs/index.md",
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
    }
    rows = "".join(f'{name} = "{page}"\n' for name, page in pages.items())
    return f"\n[project.urls]\n{rows}"


def image_of(url: str) -> str:
    """The repository's image in the registry of GitHub, whose names have small letters."""
    return f"ghcr.io/{'/'.join(url.split('/')[3:5])}".lower()


def main(source: Path, url: str, tag: str) -> None:
    """Change the copy."""
    for name in _PAGES:
        path = source / name
        folder = name.rpartition("/")[0]
        path.write_text(absolute(path.read_text("utf-8"), folder, url, tag), encoding="utf-8")
    for name in _PROJECTS:
        with (source / name).open("a", encoding="utf-8") as project:
            project.write(project_urls(url, tag))
    chart = source / _CHART
    with (chart / "Chart.yaml").open("a", encoding="utf-8") as metadata:
        metadata.write(f"home: {url}\nsources: [{url}]\n")
    image = image_of(url)
    for name, old, new in (
        ("values.yaml", _IMAGE, f"  repository: {image}\n"),
        ("README.md", _IMAGE_ROW, f'| `"{image}"` |  |'),
    ):
        text = (chart / name).read_text("utf-8")
        assert old in text, f"{name} of the chart names no image"
        (chart / name).write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2].rstrip("/"), sys.argv[3])
