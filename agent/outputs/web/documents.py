"""The pages of docs/ as HTML, with links to each other and the labels of an alert filled in."""

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import quote, urlencode

from markdown_it import MarkdownIt
from markdown_it.token import Token

_SUFFIXES = (".md", ".png")
RUNBOOKS = "runbooks/"
# Placeholders in the code of runbooks, and the label of the alert that each stands for.
_PLACEHOLDERS = {word: word.lower() for word in ("ENGINE", "MODEL", "OBJECTIVE", "INSTANCE")}
_PLACEHOLDER = re.compile(rf'("?)(?<![A-Za-z_])({"|".join(_PLACEHOLDERS)})(?![A-Za-z_])("?)')
# Labels by which the views of the page can be filtered.
_FILTERS = ("engine", "model", "objective", "gpu")
_LONGEST_LABEL = 200
# Chapters of a page that has a list of them.
_LONG_PAGE = 4

Labels = Mapping[str, str]


class Documents:
    """Markdown pages and their pictures, by their path below docs/."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder there are none."""
        paths = [] if folder is None else [each for each in folder.rglob("*") if each.is_file()]
        self._paths = {
            each.relative_to(folder).as_posix(): each
            for each in paths
            if folder is not None and each.suffix in _SUFFIXES
        }

    def path(self, name: str) -> Path | None:
        """The file of a page or a picture; None if there is none of this name."""
        return self._paths.get(name)

    def markdown(self, name: str) -> str | None:
        """The text of a page; its name may lack the suffix."""
        found = self._paths.get(name if name.endswith(".md") else f"{name}.md")
        return None if found is None else found.read_text(encoding="utf-8")


def documents() -> Documents:
    """Those of an installed package or of a checkout. Raises FileNotFoundError without any."""
    package = Path(str(files("agent")))
    installed = package / "docs"
    found = Documents(installed if installed.is_dir() else package.parent / "docs")
    if found.path(f"{RUNBOOKS}README.md") is None:
        raise FileNotFoundError(f"{installed}: no runbook is packaged")
    return found


def known_labels(given: Mapping[str, str]) -> dict[str, str]:
    """Labels of an alert among the parameters of a query, without empty ones."""
    names = {*_PLACEHOLDERS.values(), *_FILTERS}
    return {
        name: value[:_LONGEST_LABEL] for name, value in given.items() if name in names and value
    }


def html_document(name: str, markdown: str, labels: Labels) -> str:
    """A page of docs/ as HTML; `name` is its path there."""
    tokens = _MARKDOWN.parse(markdown)
    _name_headings(tokens)
    empty = _fill_in(tokens, labels)
    for each in _all(tokens):
        _restyle(each)
        _redirect(each, name, labels)
    title = next((each.content for each in tokens if each.type == "inline"), name)
    body = _MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {})
    is_runbook = name.startswith(RUNBOOKS)
    subject = _subject(labels, empty) if is_runbook else ""
    return _PAGE.format(
        title=escape(title),
        body=body.replace("</h1>", f"</h1>\n{subject}", 1),
        kind=' class="runbook"' if is_runbook else "",
        contents=_contents(tokens),
    )


def _all(tokens: Sequence[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from token.children or ()


_NO_ANCHOR = re.compile(r"[^\w\- ]")


def _name_headings(tokens: Sequence[Token]) -> None:
    """Gives headings the anchors that GitHub and mkdocs give them."""
    for heading, text in pairwise(tokens):
        if heading.type == "heading_open":
            anchor = _NO_ANCHOR.sub("", text.content.lower()).strip().replace(" ", "-")
            heading.attrSet("id", anchor)


def _fill_in(tokens: Sequence[Token], labels: Labels) -> list[str]:
    """Replaces placeholders in code; returns the labels of those that have no value."""
    empty: dict[str, None] = {}

    def value(found: re.Match[str]) -> str:
        begin, word, end = found.groups()
        label = _PLACEHOLDERS[word]
        given = labels.get(label)
        if given is None:
            empty[label] = None
            return found[0]
        quoted = begin and end
        return begin + (_promql(given) if quoted else quote(given, safe=":[]/")) + end

    for token in _all(tokens):
        if token.type in ("fence", "code_inline"):
            token.content = _PLACEHOLDER.sub(value, token.content)
    return [*empty]


def _promql(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _restyle(token: Token) -> None:
    # The page's policy allows no style in an attribute.
    if (style := token.attrs.pop("style", None)) is not None:
        token.attrSet("class", str(style).rpartition(":")[2])


_ELSEWHERE = re.compile(r"[a-z]+:|#")


def _redirect(token: Token, page: str, labels: Labels) -> None:
    """Makes a link between files one between pages of this agent."""
    attribute = {"link_open": "href", "image": "src"}.get(token.type)
    target = str(token.attrs.get(attribute or "", ""))
    if attribute is None or _ELSEWHERE.match(target):
        return
    file, hash_sign, anchor = target.partition("#")
    found = normpath(join(dirname(page), file))
    if found.startswith("../"):
        # Outside docs/, so not packaged.
        del token.attrs[attribute]
    elif found.startswith(RUNBOOKS):
        query = f"?{urlencode(labels)}" if labels else ""
        token.attrSet(attribute, f"/{found}{query}{hash_sign}{anchor}")
    else:
        token.attrSet(attribute, f"/docs/{found}{hash_sign}{anchor}")


def _subject(labels: Labels, empty: Sequence[str]) -> str:
    """What the alert is about, with links to it; fields for the labels that are not given."""
    parts = [f"{name} <strong>{escape(value)}</strong>" for name, value in labels.items()]
    chosen = {name: value for name, value in labels.items() if name in _FILTERS}
    search = urlencode(chosen)
    links = [
        f'<a href="/#{view}{"?" if search else ""}{search}">{text}</a>'
        for view, text in (("now", "Now"), ("requests", "Requests"), ("events", "Events"))
    ]
    kept = "".join(
        f'<input type="hidden" name="{name}" value="{escape(value)}">'
        for name, value in labels.items()
    )
    fields = "".join(f'<label>{name}<input name="{name}" required></label>' for name in empty)
    form = f"<form>{kept}{fields}<button>Fill in</button></form>" if empty else ""
    about = f"{', '.join(parts)}. " if parts else ""
    return f'<div class="subject"><p>{about}On the page: {", ".join(links)}.</p>{form}</div>'


def _contents(tokens: Sequence[Token]) -> str:
    """Links to the chapters of a longer page."""
    found = [
        f'<li><a href="#{heading.attrs["id"]}">{_MARKDOWN.renderInline(text.content)}</a></li>'
        for heading, text in pairwise(tokens)
        if heading.tag == "h2" and heading.type == "heading_open"
    ]
    if len(found) < _LONG_PAGE:
        return ""
    return f'<nav class="contents" aria-label="On this page"><ul>{"".join(found)}</ul></nav>'


def _scrolling_table(*_given: object) -> str:
    return '<div class="scrolling" tabindex="0" role="region" aria-label="table"><table>\n'


def _end_of_table(*_given: object) -> str:
    return "</table></div>\n"


def _block(_self: object, tokens: Sequence[Token], index: int, *_given: object) -> str:
    return f'<pre tabindex="0"><code>{escape(tokens[index].content)}</code></pre>\n'


def _markdown() -> MarkdownIt:
    """Markdown of GitHub; HTML in it is text."""
    made = MarkdownIt("commonmark", {"html": False}).enable("table")
    made.add_render_rule("table_open", _scrolling_table)
    made.add_render_rule("table_close", _end_of_table)
    made.add_render_rule("fence", _block)
    return made


_MARKDOWN = _markdown()

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} &ndash; goodput-agent</title>
<link rel="icon" href="/assets/icon.svg">
<link rel="stylesheet" href="/assets/page.css">
<link rel="stylesheet" href="/assets/document.css">
<body>
<header><p class="product"><a href="/">goodput-agent</a></p>
<nav aria-label="Documentation"><ul><li><a href="/docs">Documentation</a></li>
<li><a href="/runbooks/README.md">Runbooks</a></li>
<li><a href="/docs/api">API</a></li></ul></nav></header>
<main class="document">{contents}<article{kind}>
{body}</article></main>
</html>
"""
