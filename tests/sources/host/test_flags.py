"""The limits in the command line of an engine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import engine_facts as fact
from agent.sources.host.flags import limits_given

RUNNING, STEP = fact.MAX_RUNNING_REQUESTS.name, fact.MAX_STEP_TOKENS.name
CONTEXT = fact.MAX_CONTEXT_TOKENS.name


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        ("vllm serve m --max-num-seqs 64", {RUNNING: 64}),
        ("vllm serve m --max-num-seqs=64 --max-num-batched-tokens=8192", {RUNNING: 64, STEP: 8192}),
        ("python -m vllm.x --max_num_seqs 64 --max_model_len=4096", {RUNNING: 64, CONTEXT: 4096}),
        ("vllm serve m --max-model-len 1k", {CONTEXT: 1000}),
        ("vllm serve m --max-model-len 25.6k", {CONTEXT: 25600}),
        ("vllm serve m --max-model-len 128K", {CONTEXT: 131072}),
        ("vllm serve m --max-num-batched-tokens 1M", {STEP: 1048576}),
        ("vllm serve m --max-num-seqs 64 --max-num-seqs 32", {RUNNING: 32}),
        ("vllm serve m --max-num-seqs 64 --max-num-active-seqs 16", {RUNNING: 16}),
        ("vllm serve m --max-num-scheduled-tokens 99 --max-num-batched-tokens 100", {STEP: 99}),
    ],
)
def test_a_limit_that_was_given_is_known(line: str, limits: dict[str, int]) -> None:
    assert limits_given(line.split()) == limits


@pytest.mark.parametrize(
    "line",
    [
        "",
        "vllm serve m",
        "vllm serve m --max-model-len auto",
        "vllm serve m --max-model-len -1",
        "vllm serve m --max-num-seqs",
        "vllm serve m --max-num-seqs --api-key",
        "vllm serve m --max-num-seqs= 64",
        "vllm serve m --max-num-seqs 0",
        "vllm serve m --max-model-len 1.5K",
        "vllm serve m --max-num-seqs-of-others 64",
        "vllm serve m --no-max-num-seqs 64",
    ],
)
def test_what_was_not_given_as_a_number_is_not_guessed(line: str) -> None:
    assert limits_given(line.split()) == {}


@given(st.lists(st.text() | st.sampled_from(["--max-num-seqs", "--max-model-len=", "5k"])))
def test_any_words_are_read(words: list[str]) -> None:
    assert all(limit > 0 for limit in limits_given(words).values())
