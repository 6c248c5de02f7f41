"""Token counts that cannot be, or cannot be read."""

import json
from typing import Any

import pytest

from agent.records.request import Status
from agent.sources.proxy.exchange import Ending
from tests.sources.proxy.measuring.playing import JSON_HEAD, STREAM_HEAD, Setup

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("cached", "reasoning", "known", "failures"),
    [
        (8, 4, (8, 4), []),
        (9, 4, (None, 4), ["usage"]),
        (8, 5, (8, None), ["usage"]),
        (9, 5, (None, None), ["usage"]),
    ],
)
def test_a_part_that_is_larger_than_its_whole_is_unknown_and_counted(
    cached: int, reasoning: int, known: tuple[int | None, int | None], failures: list[str]
) -> None:
    usage = {
        "prompt_tokens": 8,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
    setup = Setup()
    record = setup.play(CHAT, {}, [json.dumps({"usage": usage}).encode()], head=JSON_HEAD).record
    assert (record.cached_tokens, record.reasoning_tokens) == known
    assert (record.input_tokens, record.output_tokens) == (8, 4)
    assert setup.failures == failures


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        ((*STREAM_HEAD, (b"content-encoding", b"gzip")), b"\x1f\x8b\x08\x00"),
        (STREAM_HEAD, b'data: {"choices":[{"delta":"text"}]}\n\n'),
        (STREAM_HEAD, b"data: text\n\n"),
    ],
)
def test_the_tokens_of_a_stream_that_cannot_be_read_are_unknown_when_the_client_leaves(
    head: Any, piece: bytes
) -> None:
    request = {"model": "m", "stream": True}
    played = Setup().play(CHAT, request, [piece], head=head, ending=Ending.CLIENT_GONE)
    assert (played.record.status, played.record.output_tokens) == (Status.CANCELLED, None)
