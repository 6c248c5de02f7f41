"""Whatever an engine serves in place of its exposition, reading gives values or a reason."""

import math
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import ExpositionUnreadable
from agent.sources.engines.exposition import Exposition, read_exposition
from agent.sources.engines.translate import AUTO, dialects_of, translate, wanted_series

PAGES = Path(__file__).parent / "pages"
NAMES = ("vllm-0.32.0-dp2", "sglang-0.4.0", "tgi-3.3.7", "trtllm-1.1.0")
DIALECTS = dialects_of(AUTO)
WANTED = wanted_series(DIALECTS)

# The same examples each time: a test that fails must fail again.
fuzz = settings(max_examples=60, deadline=None, derandomize=True, database=None)

# What the format itself is made of is likelier to lead somewhere than any other bytes.
PIECES = st.sampled_from(
    [
        b"{",
        b"}",
        b'"',
        b"\\",
        b",",
        b"=",
        b" ",
        b"\n",
        b"#",
        b"le",
        b"+Inf",
        b"NaN",
        b"1e999",
        b"\0",
    ]
) | st.binary(max_size=3)
# Python's own idea of a line has more ends than the format has.
GARBAGE = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), max_size=5)


@cache
def page(name: str) -> bytes:
    return (PAGES / f"{name}.txt").read_bytes()


@cache
def whole(name: str) -> Exposition:
    return read_exposition(page(name), WANTED)


@pytest.mark.parametrize("name", NAMES)
@fuzz
@given(spoils=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 40), PIECES), max_size=8))
def test_a_spoiled_page_gives_finite_values_or_a_reason(
    name: str, spoils: list[tuple[float, int, bytes]]
) -> None:
    body = bytearray(page(name))
    for place, gone, put in spoils:
        at = int(place * len(body))
        body[at : at + gone] = put
    try:
        found = read_exposition(bytes(body), WANTED)
        translated = translate(found, DIALECTS)
    except ExpositionUnreadable:
        return
    assert found.series.keys() <= WANTED
    assert all(math.isfinite(each.value) for of in found.series.values() for each in of)
    assert all(math.isfinite(value) for value in translated.facts.values())


@pytest.mark.parametrize("name", NAMES)
@fuzz
@given(lines=GARBAGE, data=st.data())
def test_lines_of_no_known_series_change_no_value(
    name: str, lines: list[str], data: st.DataObject
) -> None:
    parts = page(name).split(b"\n")
    for line in lines:
        # Before the first line it may make a page of another kind, behind the last a cut one.
        parts.insert(data.draw(st.integers(1, len(parts) - 1)), b"x" + line.encode())
    assert read_exposition(b"\n".join(parts), WANTED) == whole(name)


@fuzz
@given(body=st.binary(max_size=300))
def test_any_bytes_give_values_or_a_reason(body: bytes) -> None:
    try:
        found = read_exposition(body, {"a", "b"})
    except ExpositionUnreadable:
        return
    assert found.series.keys() <= {"a", "b"}
