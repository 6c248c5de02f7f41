"""Splitting bytes into server-sent events."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.proxy.measuring.sse_events import MAX_EVENT_BYTES, EventSplitter, data_of

LINE_ENDS = (b"\n", b"\r\n", b"\r")


def split(*pieces: bytes) -> list[bytes]:
    """The events of these pieces, and the rest if there is one."""
    splitter = EventSplitter()
    found = [event for piece in pieces for event in splitter.split(piece)]
    rest = splitter.take_rest()
    return [*found, rest] if rest else found


@pytest.mark.parametrize("first", LINE_ENDS)
@pytest.mark.parametrize("second", LINE_ENDS)
def test_an_empty_line_ends_an_event_with_any_line_end(first: bytes, second: bytes) -> None:
    if first + second == b"\r\n":
        return
    sent = b"data: a" + first + second + b"data: b" + first + second
    events = split(sent)
    assert [data_of(event) for event in events] == [b"a", b"b"]
    assert b"".join(events) == sent


def test_cr_lf_ends_one_line_wherever_it_is_cut() -> None:
    sent = b"data: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n"
    for at in range(len(sent)):
        assert [data_of(event) for event in split(sent[:at], sent[at:])] == [b"a\nb", b"c"]


@given(
    st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"data: x", b":", b"\xe2\x80\xa8", b"\x85"])),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_the_events_contain_all_bytes_and_do_not_depend_on_the_cuts(
    parts: list[bytes], cuts: list[int]
) -> None:
    sent = b"".join(parts)
    places = sorted({0, *(min(cut, len(sent)) for cut in cuts), len(sent)})
    pieces = [sent[a:b] for a, b in pairwise(places)]
    events = split(*pieces)
    assert b"".join(events) == sent
    assert events == split(sent)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\v", "\f", "\x1c"])
def test_no_other_character_ends_a_line(separator: str) -> None:
    data = f'{{"a":"{separator}{separator}"}}'.encode()
    events = split(b"data: " + data + b"\n\n")
    assert [data_of(event) for event in events] == [data]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: a\n\n", b"a"),
        (b"data:a\n\n", b"a"),
        (b"data:  a\n\n", b" a"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"data: a\ndata\ndata: b\n\n", b"a\nb"),
        (b"event: x\nid: 1\ndata: a\n\n", b"a"),
        (b": keep-alive\n\n", None),
        (b": data: a\n\n", None),
        (b"\n\n", None),
        (b"", None),
        (b"\xef\xbb\xbfdata: a\n\n", b"a"),
        (b"data: a", b"a"),
        (b"data: a\r\n\r\n", b"a"),
        (b"data: a\rdata: b\n\n", b"a\nb"),
    ],
)
def test_the_data_lines_of_an_event_are_joined(event: bytes, data: bytes | None) -> None:
    assert data_of(event) == data


def test_a_long_event_is_joined_from_many_pieces() -> None:
    sent = b"data: " + b"x" * (1 << 20) + b"\n\n"
    pieces = [sent[at : at + 1460] for at in range(0, len(sent), 1460)]
    assert split(*pieces) == [sent]


def test_an_event_above_the_limit_is_not_buffered() -> None:
    splitter = EventSplitter()
    piece = b"x" * (MAX_EVENT_BYTES + 1)
    assert splitter.split(piece) == [piece]
    assert not splitter.waiting
    assert splitter.split(b"\n\ndata: a\n\n")[-1] == b"data: a\n\n"
