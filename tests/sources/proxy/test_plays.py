"""Recorded streams, and requests on the wire, through the proxy: what is expected is in a file."""

import pytest

from tests.sources.proxy.plays import (
    CUTS,
    HEADS,
    NAMES,
    WIRE,
    as_json,
    play_stream,
    play_wire,
    read_expected,
)

OUTCOMES, PLAYS = read_expected()


def test_every_play_is_expected_and_no_other() -> None:
    streams = {f"{name} {head} {cut}" for name in NAMES for head in HEADS for cut in CUTS}
    wire = {f"wire {name} {by_bytes}" for name in WIRE for by_bytes in (False, True)}
    assert set(PLAYS) == streams | wire


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", NAMES)
async def test_a_recorded_stream_passes_and_is_recorded(name: str, head: str) -> None:
    for cut in CUTS:
        outcome = as_json(await play_stream(name, head, cut))
        assert outcome == OUTCOMES[PLAYS[f"{name} {head} {cut}"]], cut


@pytest.mark.parametrize("by_bytes", [False, True], ids=["at once", "by bytes"])
@pytest.mark.parametrize("name", WIRE)
async def test_a_request_on_the_wire_gets_its_response(name: str, by_bytes: bool) -> None:
    outcome = as_json(await play_wire(name, by_bytes=by_bytes))
    assert outcome == OUTCOMES[PLAYS[f"wire {name} {by_bytes}"]]
