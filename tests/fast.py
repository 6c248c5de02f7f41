"""Which tests `pytest --fast` selects: those that start no server, browser or engine.

A test needs real parts when its module imports, itself or through other modules of the tests, one
that runs them, when it uses PostgreSQL or ClickHouse, or when it is marked `slow`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What each of these runs takes seconds or is not installed everywhere.
PARTS = frozenset(
    f"tests.real_parts.{name}"
    for name in ("alertmanager", "chromium", "helm", "processes", "prometheus", "tiny_model")
)
SERVERS = ("postgres", "clickhouse")
# By pattern, because to parse every module takes seconds in each process of the tests.
_IMPORT = re.compile(
    r"^[ \t]*(?:from|import) (tests[\w.]*)(?: import (\([^)]*\)|.*))?", re.MULTILINE
)
# What a module uses that starts a process or a thread, waits, or reads a clock.
_TIME = re.compile(
    r"^[ \t]*(?:from|import) (?:asyncio|concurrent|multiprocessing|psutil|selectors|signal|socket"
    r"|subprocess|threading|time)\b|datetime\.now\(",
    re.MULTILINE,
)


def needs_parts(item: pytest.Item) -> bool:
    """Whether a test is left out by `--fast`."""
    return item.get_closest_marker("slow") is not None or uses_parts(item)


def uses_parts(item: pytest.Item) -> bool:
    """Whether a test uses real parts."""
    return _uses_server(item) or runs_parts(item.path)


def meets_time(item: pytest.Item) -> bool:
    """Whether a test uses real parts, starts a process or a thread, waits, or reads a clock."""
    return needs_parts(item) or _reads_time(item.path)


def _uses_server(item: pytest.Item) -> bool:
    fixtures: Iterable[str] = getattr(item, "fixturenames", ())
    callspec = getattr(item, "callspec", None)
    values = [] if callspec is None else callspec.params.values()
    named = [value for value in values if isinstance(value, str)]
    return any(server in name for server in SERVERS for name in (*fixtures, *named))


@cache
def runs_parts(path: Path) -> bool:
    """Whether a module of the tests imports one of PARTS, directly or not."""
    return not PARTS.isdisjoint(_reached(path, set()))


@cache
def _reads_time(path: Path) -> bool:
    modules = [path, *map(_file, _reached(path, set()))]
    texts = (module.read_text(encoding="utf-8") for module in modules if module.is_file())
    return any(map(_TIME.search, texts))


def _file(name: str) -> Path:
    return ROOT / f"{name.replace('.', '/')}.py"


def _reached(path: Path, seen: set[Path]) -> Iterator[str]:
    seen.add(path)
    for name in _imports(path):
        yield name
        module = _file(name)
        if module not in seen and module.is_file():
            yield from _reached(module, seen)


@cache
def _imports(path: Path) -> tuple[str, ...]:
    """The modules of the tests that a module imports, however deep in it."""
    names = []
    for source, imported in _IMPORT.findall(path.read_text(encoding="utf-8")):
        # A name may be a module of the package.
        names += [source, *(f"{source}.{name}" for name in re.findall(r"\w+", imported))]
    return tuple(names)


def forbid_parts(patched: pytest.MonkeyPatch) -> None:
    """Make every start of a real part an error."""

    def refuse(_self: object, arguments: Sequence[object], *_: object, **__: object) -> None:
        raise AssertionError(f"a fast test starts {arguments[0]}: mark it slow")

    patched.setattr("tests.real_parts.processes.ServerProcess.__init__", refuse)
