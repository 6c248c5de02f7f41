"""Do offload and drafts pay: vLLM's own arithmetic, and engines whose step times are known."""

import re
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.savings import Drafting, Pays, drafting, offload, savings_by_engine
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import HistogramSnapshot
from agent.records.engine_counts import CountsRow, EngineCounts
from agent.sources.engines.translate import TranslatedExposition
from tests.real_parts.engine_scripts import answer_of
from tests.records.making import NOON
from tests.sources.engines.fixture_pages import body, translated_body

# Drafted and accepted tokens of each draft of each step.
DRAFTS = [[[3, 2], [3, 0], [2, 2]], [[3, 3]], [[3, 1], [3, 0]]]
ASKED = {"drafts": DRAFTS, "loads": [[0.5, 1000], [0.25, 400]], "tier_reads": [[0.125, 500]]}


def vllm_of(asked: object) -> dict[str, Any]:
    """The log and the page of vLLM's own classes."""
    found: dict[str, Any] = answer_of("vllm_cache_metrics.py", asked)
    return found


def page_with(series: str) -> TranslatedExposition:
    return translated_body(body("vllm-0.32.0") + series.encode())


def counts(values: dict[Metric, float], **sums: tuple[Metric, float, float]) -> EngineCounts:
    """Counters by metric, and histograms by their sum and count."""
    return EngineCounts(
        covered_s=60.0,
        counters={(metric.name, ()): value for metric, value in values.items()},
        histograms={
            metric.name: HistogramSnapshot((1.0, inf), (0.0, number), total)
            for metric, total, number in sums.values()
        },
    )


def test_drafts_are_as_in_the_log_of_vllm() -> None:
    found = vllm_of(ASKED)
    (line,) = found["log"]
    mine = drafting(EngineCounts(covered_s=60.0, counters=page_with(found["page"]).facts))
    assert mine is not None
    assert mine.acceptance_ratio is not None

    def logged(name: str) -> str:
        text = re.search(rf"{name}: ([\d., %]+?)(?:, [A-Z]|$)", line)
        assert text is not None, line
        return text[1]

    assert f"{mine.mean_accepted_length:.2f}" == logged("Mean acceptance length")
    assert f"{100 * mine.acceptance_ratio:.1f}%" == logged("Avg Draft acceptance rate")
    by_position = ", ".join(f"{each:.3f}" for each in mine.accepted_ratio_by_position.values())
    assert by_position == logged("Per-position acceptance rate")
    assert [*mine.accepted_ratio_by_position] == [0, 1, 2]


def test_loads_are_read_as_vllm_publishes_them() -> None:
    facts = page_with(vllm_of(ASKED)["page"]).facts
    assert facts[fact.KV_OFFLOAD_LOAD_TIME.name, ()] == 0.75
    assert facts[fact.KV_OFFLOAD_LOAD_BYTES.name, ()] == 1400
    assert facts[fact.KV_OFFLOAD_TIER_READ_TIME.name, ("fs",)] == 0.125
    assert facts[fact.KV_OFFLOAD_TIER_QUERIES.name, ("fs",)] == 4
    assert facts[fact.KV_OFFLOAD_TIER_HITS.name, ("fs",)] == 3


def test_lmcache_and_older_names_are_times_of_loading_too() -> None:
    labels = 'engine="0",model_name="org/model-8b"'
    new = f"vllm:kv_offload_load_time_total{{{labels}}} 2.0\n"
    lmcache = 'lmcache:time_to_retrieve_sum{model_name="org/model-8b",worker_id="0"} 3.0\n'
    older = "".join(
        f'vllm:kv_offload_total_time_total{{{labels},transfer_type="{way}"}} {seconds}\n'
        for way, seconds in (("CPU_to_GPU", 5.0), ("GPU_to_CPU", 7.0))
    )
    for page, seconds in ((new + older, 2.0), (lmcache, 3.0), (new + lmcache, 5.0), (older, 5.0)):
        assert page_with(page).facts[fact.KV_OFFLOAD_LOAD_TIME.name, ()] == seconds


OFFLOAD: dict[Metric, float] = {
    fact.INPUT_TOKENS: 12.0e6,
    fact.CACHED_INPUT_TOKENS: 9.3e6,
    fact.EXTERNAL_CACHE_QUERY_TOKENS: 4.2e6,
    fact.EXTERNAL_CACHE_HIT_TOKENS: 1.5e6,
    fact.KV_OFFLOAD_LOAD_TIME: 31.0,
}
PREFILL = (fact.PREFILL_TIME, 297.0, 4000.0)


def test_the_offload_of_the_docs_pays() -> None:
    found = offload(counts(OFFLOAD, prefill=PREFILL))
    assert found is not None
    assert found.saved_s == pytest.approx(165.0)
    assert (found.load_s, found.verdict) == (31.0, Pays.PAYS)
    assert found.hit_ratio == pytest.approx(1.5 / 4.2)


def test_a_slow_tier_does_not_pay() -> None:
    found = offload(counts({**OFFLOAD, fact.KV_OFFLOAD_TIER_READ_TIME: 140.0}, prefill=PREFILL))
    assert found is not None
    assert (found.load_s, found.verdict) == (171.0, Pays.DOES_NOT_PAY)


@pytest.mark.parametrize("missing", [fact.KV_OFFLOAD_LOAD_TIME, fact.CACHED_INPUT_TOKENS])
def test_offload_whose_times_are_unknown_has_no_verdict(missing: Metric) -> None:
    values = {metric: value for metric, value in OFFLOAD.items() if metric is not missing}
    found = offload(counts(values, prefill=PREFILL))
    assert found is not None
    assert found.verdict is Pays.UNKNOWN
    assert None in (found.saved_s, found.load_s)


def test_an_engine_that_looks_up_nothing_outside_has_no_offload_and_no_savings() -> None:
    unused = counts({fact.EXTERNAL_CACHE_QUERY_TOKENS: 0.0, fact.EXTERNAL_CACHE_HIT_TOKENS: 0.0})
    assert offload(unused) is None
    row = CountsRow("a", "chat-0", "llama", 60, NOON, NOON + 60.0, unused)
    assert savings_by_engine([row]) == []


def drafting_engine(
    batches: Sequence[float], fixed_s: float, token_s: float, *, tokens: int = 3, accepted: float
) -> Drafting:
    """An engine with one batch in each minute, whose steps take a time by the verified tokens."""
    rows = []
    for minute, batch in enumerate(batches):
        step_s = fixed_s + token_s * batch * (1 + tokens)
        steps = 60.0 / step_s
        drafts = steps * batch
        own = counts(
            {
                fact.STEPS: steps,
                fact.SPEC_DECODE_DRAFTS: drafts,
                fact.SPEC_DECODE_DRAFT_TOKENS: drafts * tokens,
                fact.SPEC_DECODE_ACCEPTED_TOKENS: drafts * accepted,
            },
            gaps=(fact.INTER_TOKEN_LATENCY, drafts * step_s, drafts),
        )
        start = int(NOON) + 60 * minute
        rows.append(CountsRow("a", "chat-0", "llama", 60, start, start + 60.0, own))
    (found,) = savings_by_engine(rows)
    assert found.speculation is not None
    return found.speculation


@given(
    st.floats(0.001, 0.05),
    st.floats(0, 0.001),
    st.floats(0, 3),
    st.lists(st.sampled_from([4.0, 8.0, 16.0, 64.0]), min_size=3, max_size=20),
)
def test_the_estimate_is_what_the_engine_would_do_without_drafts(
    fixed_s: float, token_s: float, accepted: float, batches: list[float]
) -> None:
    found = drafting_engine([4.0, *batches, 64.0], fixed_s, token_s, accepted=accepted)
    batch = found.drafts_per_step
    assert batch is not None
    without = batch / (fixed_s + token_s * batch)
    with_drafts = batch * (1 + accepted) / (fixed_s + token_s * batch * 4)
    # A line through steps that all take as long has no sign that rounding does not change.
    if found.speedup is None:
        assert token_s * 4 * 64 < 1e-6 * fixed_s
        return
    assert found.speedup == pytest.approx(with_drafts / without, rel=1e-6)
    assert found.at_least <= found.speedup * (1 + 1e-6)
    assert found.speedup <= found.at_most * (1 + 1e-6)
    assert found.verdict is (Pays.PAYS if found.speedup > 1 else Pays.DOES_NOT_PAY)


def test_the_drafts_of_the_docs_pay_and_would_not_in_a_large_batch() -> None:
    found = drafting_engine([8, 12, 16, 20, 24] * 4, 0.018, 0.00014, accepted=1.2)
    assert found.speedup == pytest.approx(1.65, abs=0.05)
    assert found.at_most == pytest.approx(2.2)
    assert found.at_least == pytest.approx(0.55)
    assert found.verdict is Pays.PAYS
    large = drafting_engine([200, 300, 400] * 4, 0.018, 0.00014, accepted=1.2)
    assert large.verdict is Pays.DOES_NOT_PAY


@pytest.mark.parametrize("batches", [[16.0] * 20, [8.0, 16.0, 32.0], [16.0, 17.0, 18.0] * 5])
def test_batches_that_are_alike_or_few_show_nothing_but_the_bounds(batches: list[float]) -> None:
    found = drafting_engine(batches, 0.018, 0.00014, accepted=1.2)
    assert (found.speedup, found.verdict) == (None, Pays.UNKNOWN)
    assert found.at_least < 1 < found.at_most
