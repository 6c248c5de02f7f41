"""Token counts that cannot be."""

import json

import pytest

from tests.sources.proxy.measuring.playing import JSON_HEAD, Setup

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
