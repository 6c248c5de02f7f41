"""Of a link that leaves docs/ the site has the text alone: its file is not on the site."""

import re
from posixpath import dirname, join, normpath
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_others: Any) -> str:
    """The page's text without such links; mkdocs calls this."""
    folder = dirname(page.file.src_uri)

    def kept(found: re.Match[str]) -> str:
        leaves = normpath(join(folder, found[2])).startswith("../")
        return found[1] if leaves else found[0]

    return _LINK.sub(kept, markdown)
