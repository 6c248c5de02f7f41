"""Explanations of single requests, and that shares always add up to the excess."""

from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.analysis.causes import EngineTimeline, explain, rules
from agent.analysis.causes.missed_case import Claim
from agent.analysis.causes.rolling import SLOT_S, SLOTS, RollingQuantile, RunningSums
from agent.analysis.joined_record import served_row
from agent.analysis.verdicts import excesses
from agent.catalog import engine_facts as fact
from agent.catalog.causes import Cause
from agent.catalog.reasons import ProxyFailure
from agent.records.engine import EndedRequest, ProcessRole, ServedRequest
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.analysis.causes.making import (
    AT,
    OBJECTIVE,
    STRICT,
    queued,
    row,
    sample,
    sample_each_second,
    starve,
    step,
    top_cause,
    usual,
)


def test_a_full_kv_cache_holds_the_queue() -> None:
    timeline = usual()
    sample_each_second(timeline, range(1, 8), waiting=5.0, kv=0.99)
    found = explain(queued(AT + 1, 4.0), [OBJECTIVE], timeline)
    assert found.top is Cause.KV_PRESSURE
    assert found.sources == ("span", "samples")
    (share,) = [share for share in found.shares if share.cause is Cause.KV_PRESSURE]
    assert share.limit == "ttft"
    assert share.excess_s == pytest.approx(3.85, rel=0.05)
    assert "KV cache was full" in share.evidence[0]


@pytest.mark.parametrize("order", [1, -1])
def test_the_cause_of_a_request_is_that_of_the_objective_that_it_exceeded_most(order: int) -> None:
    timeline = usual()
    sample_each_second(timeline, range(1, 8), waiting=5.0, kv=0.99)
    both = queued(AT + 1, 4.0, tpot_s=0.06, decode_s=0.6)
    by_queue, by_stream = replace(OBJECTIVE, tpot_s=None), replace(OBJECTIVE, ttft_s=None)
    assert explain(both, [by_stream], timeline).top is not Cause.KV_PRESSURE
    found = explain(both, [by_queue, by_stream][::order], timeline)
    assert found.top is Cause.KV_PRESSURE


def test_the_plugin_is_a_source_if_it_reported_the_steps_of_that_time() -> None:
    timeline = usual()
    sample_each_second(timeline, range(1, 8), waiting=5.0, kv=0.99)

    def sources(until: float) -> tuple[str, ...]:
        for number in range(20):
            timeline.step(step(until - 0.2 + number / 100, 0.01))
        return explain(queued(AT + 1, 4.0), [OBJECTIVE], timeline).sources

    assert sources(AT - 40) == ("span", "samples")
    assert sources(AT + 5.2) == ("plugin", "span", "samples")


def test_without_samples_a_queue_is_unexplained_and_names_sources_that_would_help() -> None:
    found = explain(row(ttft_s=4.05, queue_s=4.0, e2e_s=4.15), [OBJECTIVE], EngineTimeline())
    assert found.top is Cause.UNEXPLAINED
    text = " ".join(sentence for share in found.shares for sentence in share.evidence)
    assert "samples of the engine" in text
    assert "plugin" in text


def test_a_rounding_error_is_not_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def claims(claimed_s: float) -> set[Cause]:
        rule = rules.Rule(Cause.NETWORK, lambda *_: Claim(claimed_s, ("late",)))
        monkeypatch.setattr(rules, "rules_of", lambda *_: rules.PhaseRules((), (rule,)))
        found = explain(row(ttft_s=4.05, queue_s=4.0, e2e_s=4.15), [OBJECTIVE], EngineTimeline())
        return {Cause(share.cause) for share in found.shares}

    assert Cause.NETWORK in claims(0.5)
    assert Cause.NETWORK not in claims(1e-16)


def test_a_prompt_longer_than_any_before_needs_their_time_for_each_token() -> None:
    """They took 35 ms for 400 tokens, so 8,000 need 0.7 s."""

    def shares(prefill_s: float) -> dict[Cause, float]:
        times = {"prefill_s": prefill_s, "ttft_s": prefill_s + 0.02, "e2e_s": prefill_s + 0.12}
        found = explain(row(AT + 1, input_tokens=8000, **times), [OBJECTIVE], usual())
        return {share.cause: share.excess_s or 0.0 for share in found.shares}

    quick, slow = shares(0.7), shares(2.0)
    assert quick[Cause.LONG_PROMPT] == pytest.approx(0.5, rel=0.01)
    assert slow[Cause.LONG_PROMPT] == pytest.approx(0.52, rel=0.01)
    # Nothing shows why it took 1.3 s more.
    assert slow[Cause.UNEXPLAINED] - quick[Cause.UNEXPLAINED] == pytest.approx(1.3, rel=0.03)


def test_prompts_of_others_in_the_steps_are_named() -> None:
    timeline = usual()
    for number in range(100):
        timeline.step(step(AT - 40 + number / 100, 0.01, 0, 1))
    for number in range(10):
        timeline.step(step(AT - 30 + number, 0.41, 4000, 1))
    slow = row(AT + 1, tpot_s=0.13, decode_s=1.3, e2e_s=1.35)
    for number, prompt in enumerate((14_000, 14_002, 13_998)):
        at = AT + 1.1 + number * 0.4
        timeline.step(step(at + 0.4, 0.4, 4000, 1))
        timeline.request(row(at, input_tokens=prompt, prefill_s=0.39, ttft_s=0.4, e2e_s=0.5))
    timeline.step(step(AT + 2.35, 0.05, 0, 1))
    found = explain(slow, [OBJECTIVE], timeline)
    assert found.top is Cause.PREFILL_INTERFERENCE
    text = " ".join(sentence for share in found.shares for sentence in share.evidence)
    assert "3 prompts of other requests" in text
    assert "14,002, 14,000, 13,998" in text


def test_the_plugin_reports_a_preemption_of_the_request_itself() -> None:
    timeline = usual()
    for number in range(200):
        timeline.step(step(AT + number / 100, 0.01, 0, 1))
    preempted = row(AT, tpot_s=0.15, decode_s=1.5, e2e_s=1.55)
    ended = EndedRequest("chat-0", "r", AT + 1.55, "length", 400, 11, 0, 1, 0.01, 0.035, 1.5, 1.55)
    assert explain(preempted, [OBJECTIVE], timeline, ended).top is Cause.PREEMPTION
    none = ended._replace(preemptions=0)
    assert explain(preempted, [OBJECTIVE], timeline, none).top is not Cause.PREEMPTION


def test_a_starved_core_is_charged_what_it_waited() -> None:
    timeline = usual()
    starve(timeline, -5, 6)
    found = explain(row(AT + 1, tpot_s=0.2, decode_s=2.0, e2e_s=2.05), [OBJECTIVE], timeline)
    assert found.top is Cause.CPU_STARVED
    # It waited 1.8 s of the 2 s, which are 1.5 s above the limit.
    assert found.shares[0].excess_s == pytest.approx(1.5 * 1.8 / 1.9, rel=0.1)


def test_a_queue_is_charged_to_a_starved_core_as_far_as_that_waited_meanwhile() -> None:
    timeline = usual()
    starve(timeline, -5, 8)
    for second in range(1, 8):
        done = 40_000.0 + 4 * second
        few = {"steps": done, "output": done, "step_tokens": 41 * done, "waiting": 5.0}
        timeline.sample(sample(AT + second, **few))
    found = explain(queued(AT + 1, 4.0), [OBJECTIVE], timeline)
    assert found.top is Cause.CPU_STARVED
    # It waited nine tenths of the time in which 3.85 s more than the limit went by.
    assert found.shares[0].excess_s == pytest.approx(0.9 * 3.85, rel=0.1)


def test_a_front_that_is_slower_than_usual_is_charged_unless_that_is_noise() -> None:
    """It usually takes 15 ms. A core that takes no requests for a while delays only some."""

    def causes(front_s: float, *others_s: float) -> set[Cause]:
        timeline = usual(queue_s=0.0)
        for number, other_s in enumerate(others_s):
            times = {"queue_s": 0.0, "ttft_s": 0.035 + other_s, "e2e_s": 0.135 + other_s}
            timeline.request(row(AT + 20 + number / 10, **times))
        times = {"queue_s": 4.0, "ttft_s": 4.035 + front_s, "e2e_s": 4.135 + front_s}
        found = explain(row(AT + 20, **times), [OBJECTIVE], timeline)
        return {Cause(share.cause) for share in found.shares}

    assert Cause.TOKENISING in causes(0.3)
    assert Cause.TOKENISING in causes(0.3, *[0.3] * 5)
    assert Cause.TOKENISING not in causes(0.3, *[0.015] * 5)
    assert Cause.TOKENISING not in causes(0.02)


def through_proxy(at: float, first_byte_s: float) -> RequestRecord:
    """A request that the engine served quickly."""
    return row(at, ttft_s=first_byte_s, e2e_s=first_byte_s + 0.1)._replace(
        vantage=Vantage.JOINED,
        proxied=ProxyView(first_byte_s=first_byte_s, streamed=True, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.05, tpot_s=0.01, e2e_s=0.15),
    )


def test_a_late_first_byte_is_the_networks_if_it_is_known_when_it_usually_comes() -> None:
    timeline, late = usual(), through_proxy(AT + 9, 0.9)
    assert top_cause(late, timeline) is Cause.UNEXPLAINED
    for number in range(8):
        timeline.request(through_proxy(AT + number, 0.052))
    assert top_cause(late, timeline) is Cause.NETWORK


def test_a_client_that_reads_slowly_is_no_fault_of_the_engine() -> None:
    slow = row(AT + 1, tpot_s=0.3, e2e_s=3.1)._replace(
        vantage=Vantage.JOINED,
        proxied=ProxyView(first_byte_s=0.051, streamed=True, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.05, tpot_s=0.01, e2e_s=0.15),
    )
    found = explain(slow, [OBJECTIVE], usual())
    assert (found.top, found.sources[:2]) == (Cause.SLOW_CLIENT, ("span", "proxy"))


@pytest.mark.parametrize(
    ("reasoning_tokens", "top"), [(0, Cause.PARSER_HOLDBACK), (50, Cause.UNEXPLAINED)]
)
def test_reasoning_that_is_not_streamed_is_held_back_by_no_parser(
    reasoning_tokens: int, top: Cause
) -> None:
    late = row(AT + 1, ttft_s=2.0, e2e_s=2.1, reasoning_tokens=reasoning_tokens)._replace(
        vantage=Vantage.JOINED,
        proxied=ProxyView(first_byte_s=0.051, first_visible_s=2.0, streamed=True, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.05, tpot_s=0.01, e2e_s=2.1),
    )
    assert top_cause(late, usual()) is top


def test_a_request_that_ran_when_its_engine_died_is_a_failure_of_the_engine() -> None:
    timeline = usual()
    timeline.died(AT + 3, "HOST_OOM")
    broken = row(AT + 1, status=Status.ERROR, e2e_s=2.0)
    (share,) = explain(broken, [OBJECTIVE], timeline).shares
    assert (share.cause, share.limit, share.excess_s) == (Cause.ENGINE_FAILURE, "failure", None)
    assert "HOST_OOM" in share.evidence[0]


@pytest.mark.parametrize(
    ("http_status", "error", "top"),
    [
        (500, None, Cause.ENGINE_FAILURE),
        (200, "connection_lost", Cause.ENGINE_FAILURE),
        (200, ProxyFailure.WORKER_DIED, Cause.UNEXPLAINED),
        (400, None, Cause.UNEXPLAINED),
    ],
)
def test_an_error_of_the_response_is_the_engines_unless_a_worker_of_the_proxy_died(
    http_status: int, error: str | None, top: Cause
) -> None:
    broken = row(AT + 1, status=Status.ERROR, http_status=http_status)._replace(
        proxied=ProxyView(error=error)
    )
    assert top_cause(broken, usual()) is top


_seconds = st.floats(0.0, 20.0)


@settings(max_examples=30)
@given(
    st.tuples(_seconds, _seconds, _seconds, _seconds),
    st.sampled_from([Vantage.ENGINE, Vantage.PROXY, Vantage.JOINED]),
    st.sampled_from([Status.OK, Status.CANCELLED]),
    st.integers(0, 500),
    st.booleans(),
)
def test_the_shares_of_a_limit_add_up_to_its_excess(
    phases: tuple[float, float, float, float],
    vantage: Vantage,
    status: Status,
    output_tokens: int,
    plugin: bool,
) -> None:
    front_s, queue_s, prefill_s, decode_s = phases
    timeline = _busy(plugin)
    ttft_s = front_s + queue_s + prefill_s
    late = 1.0 if vantage is Vantage.ENGINE else 1.25
    record = row(
        AT + 1,
        vantage=vantage,
        status=status,
        ttft_s=ttft_s * late,
        tpot_s=decode_s * late / (output_tokens - 1) if output_tokens > 1 else None,
        e2e_s=(ttft_s + decode_s) * late,
        queue_s=queue_s,
        prefill_s=None if vantage is Vantage.PROXY else prefill_s,
        decode_s=None if vantage is Vantage.PROXY else decode_s,
        output_tokens=output_tokens,
    )
    if vantage is not Vantage.ENGINE:
        record = record._replace(proxied=ProxyView(streamed=True, first_byte_s=ttft_s, choices=1))
    if vantage is Vantage.JOINED:
        view = EngineView(status=Status.OK, ttft_s=ttft_s, e2e_s=ttft_s + decode_s)
        record = record._replace(engine_view=view)
    found = explain(record, [OBJECTIVE, STRICT], timeline)
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    for share in found.shares:
        assert share.excess_s is None or share.excess_s >= 0
        assert share.evidence
        sums[share.objective, share.limit] += share.excess_s or 0.0
    for excess in [each for one in (OBJECTIVE, STRICT) for each in excesses(record, one)]:
        assert sums.pop((excess.objective, excess.limit)) == pytest.approx(excess.seconds or 0.0)
    assert not sums
    assert found.shares


def _busy(plugin: bool) -> EngineTimeline:
    """An engine under load of every kind."""
    timeline = usual()
    for second in range(1, 60):
        timeline.sample(
            sample(
                AT + second,
                **{
                    "waiting": second % 7,
                    "running": 4.0 * (second % 5),
                    "kv": (second % 10) / 9,
                    "preemptions": second // 6,
                },
            )
        )
        if plugin:
            timeline.step(step(AT + second, 0.9, 100 * (second % 4), second % 20))
    return timeline


def test_a_long_response_of_an_engine_as_quick_as_ever_is_a_long_output() -> None:
    """400 tokens at the 10 ms that each usually takes are 4 s; the limit is 1 s."""
    slow = row(AT + 1, output_tokens=401, decode_s=4.0, e2e_s=4.05)
    found = explain(slow, [STRICT], _after(usual(), slow))
    assert found.top is Cause.LONG_OUTPUT
    (share,) = found.shares
    assert share.limit == "e2e"
    assert share.excess_s == pytest.approx(3.05)
    assert "401 tokens" in share.evidence[0]


def test_a_long_response_is_charged_for_its_delay_and_for_its_length() -> None:
    """Each token took three times as long as usual: 8 of the 12 s are delay."""
    slow = row(AT + 1, output_tokens=401, tpot_s=0.03, decode_s=12.0, e2e_s=12.05)
    found = explain(slow, [STRICT], _after(usual(), slow))
    charged = {share.cause: share.excess_s for share in found.shares}
    assert charged[Cause.LONG_OUTPUT] == pytest.approx(3.05, rel=0.05)
    assert found.top is not Cause.LONG_OUTPUT
    # A limit on the time of a token says nothing of their number, and of usual length is no excuse.
    tpot_only, tight = (replace(STRICT, ttft_s=None, **each) for each in (
        {"tpot_s": 0.009, "e2e_s": None}, {"e2e_s": 0.1}
    ))  # fmt: skip
    assert explain(row(AT + 1, output_tokens=401), [tpot_only], usual()).top is Cause.UNEXPLAINED
    assert explain(row(AT + 1), [tight], usual()).top is Cause.UNEXPLAINED


def _after(timeline: EngineTimeline, of: RequestRecord) -> EngineTimeline:
    """The engine as it was, until a request ended."""
    for second in range(1, int(of.ended_at - AT) + 3):
        timeline.sample(sample(AT + second))
    return timeline


@pytest.mark.parametrize("plugin", [True, False])
def test_refused_drafts_are_charged_the_tokens_that_they_cost(plugin: bool) -> None:
    """A step had 1 + 2 tokens of a request, and now has 1 + 0.2: 60 % of the time is lost."""
    timeline = EngineTimeline()
    for second in range(-60, 6):
        drafts = 10.0 * (second + 60)
        accepted = 20.0 * (min(second, 0) + 60) + 2.0 * max(second, 0)
        facts = {
            "draft_runs": drafts,
            "accepted": accepted,
        }
        timeline.sample(sample(AT + second, **facts))
        timeline.request(row(AT + second - 1))
        for number in range(33 if plugin else 0):
            timeline.step(step(AT + second + number / 33, 0.03, 0, 3 if second < 0 else 1))
    slow = row(AT + 1, tpot_s=0.1, decode_s=1.0, e2e_s=1.05)
    found = explain(slow, [OBJECTIVE], timeline)
    assert found.top is Cause.SPECULATION
    (share,) = [share for share in found.shares if share.cause is Cause.SPECULATION]
    # 0.6 s of the 0.9 s of delay, of which 0.5 s are above the limit.
    assert share.excess_s == pytest.approx(0.5 * 0.6 / 0.9, rel=0.1)


def test_a_gauge_that_no_step_renewed_is_no_empty_queue() -> None:
    """One step takes three seconds, in which 12 requests come, as always."""
    timeline = usual()
    base = {name: 40_000.0 for name in ("steps", "output")}
    done = base | {"finished": 4000.0, "step_tokens": 1_640_000.0}
    for second in range(1, 5):
        steps = {name: base[name] + (second >= 3) for name in base}
        waiting = 12.0 if second >= 3 else 0.0
        facts = done | steps | {"waiting": waiting}
        timeline.sample(sample(AT + second, **facts))
    change = timeline.sampled.change(AT + 2.6, AT + 4)
    assert change is not None
    assert change.arrivals == pytest.approx(change.usual_arrivals, rel=0.1)
    assert change.since == AT


def test_an_engine_that_counts_no_steps_shows_its_empty_queue() -> None:
    timeline = EngineTimeline()
    for second in range(-60, 3):
        known = sample(AT + second)
        facts = {key: value for key, value in known.facts.items() if key[0] != fact.STEPS.name}
        timeline.sample(replace(known, facts=facts))
    change = timeline.sampled.change(AT + 0.5, AT + 1)
    assert change is not None
    assert change.since == AT


# Sums over periods and rolling quantiles, against adding up and sorting all values

_rows = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 2.0), st.floats(0.0, 50.0)), max_size=40
)


def _laid_out(rows: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Rows of gap, length and value as begin, end and value."""
    laid, at = [], 100.0
    for gap, length, value in rows:
        begin = at + gap
        at = begin + length
        laid.append((begin, at, value))
    return laid


@given(_rows, st.floats(90.0, 250.0), st.floats(0.0, 100.0))
def test_a_period_has_the_part_of_each_row_that_lies_in_it(
    rows: list[tuple[float, float, float]], start: float, length: float
) -> None:
    sums, laid = RunningSums(1, max_rows=1000), _laid_out(rows)
    for begin, end, value in laid:
        sums.add(begin, end, (value,))
    end_of = start + length
    covered = [max(0.0, min(end_of, end) - max(start, begin)) for begin, end, _ in laid]
    parts = [
        value * part / (end - begin)
        for (begin, end, value), part in zip(laid, covered, strict=True)
    ]
    assert sums.between(start, end_of) == pytest.approx([sum(covered), sum(parts)], abs=1e-6)


def test_short_rows_are_merged_and_only_the_newest_are_kept() -> None:
    sums = RunningSums(1, max_rows=1000, width_s=0.1)
    for number in range(1000):
        sums.add(number / 100, (number + 1) / 100, (1.0,))
    assert len(sums) <= 110
    assert sums.between(0, 10) == pytest.approx([10.0, 1000.0])
    assert sums.between(4, 5)[1] == pytest.approx(100.0, abs=1.0)
    newest = RunningSums(1, max_rows=10)
    for second in range(1000):
        newest.add(second, second + 1, (1.0,))
    assert len(newest) <= 20
    assert newest.between(995, 1000) == pytest.approx([5.0, 5.0])
    assert newest.between(0, 1000)[1] <= 20


@pytest.mark.parametrize("q", [0.2, 0.5])
def test_it_is_the_quantile_of_the_last_hour(q: float) -> None:
    random, rolling, values = Random(3), RollingQuantile(q), []
    for second in range(6000):
        value = random.lognormvariate(-3.0, 0.5) * (1 + second / 3000)
        rolling.add(second, value)
        values.append((second, value))
    from_second = (5999 // SLOT_S - SLOTS + 1) * SLOT_S
    last = sorted(value for second, value in values if second >= from_second)
    assert rolling.count == len(last)
    # Within the error of a bin, and the twentieth of new values before it is computed anew.
    assert rolling.value() == pytest.approx(last[int(q * len(last))], rel=0.03)
    rolling.add(6000 + SLOT_S * (SLOTS + 10), 5.0)
    assert rolling.count == 1
    assert rolling.value() == pytest.approx(5.0, rel=0.01)
    assert rolling.value(at_least=2) is None


def front_row(**values: Any) -> RequestRecord:
    """The row of the middleware in the engine's front; the engine itself was quick."""
    of = row(AT + 1, **values)
    view = ProxyView(first_byte_s=of.ttft_s, streamed=True, choices=1)
    record = of._replace(vantage=Vantage.PROXY, proxied=view, parent_span_id=None)
    return served_row(ServedRequest(record, (QUICK,)))


QUICK = EndedRequest(
    "chat-0", "r", AT + 1.15, "stop", 400, 11, 0, 0, 0.0, 0.035, 0.1, 0.15, 0.05
)  # fmt: skip


def test_a_stream_that_was_late_in_the_front_is_no_slow_client() -> None:
    found = explain(front_row(tpot_s=0.3, e2e_s=3.05), [OBJECTIVE], usual(), QUICK)
    assert (found.top, found.sources) == (Cause.UNEXPLAINED, ("plugin",))
    assert "of delay in the engine's front" in found.shares[0].evidence[0]


def test_a_first_byte_that_was_late_in_the_front_is_no_network() -> None:
    late = {"ttft_s": 2.0, "e2e_s": 2.1}
    assert explain(front_row(**late), [OBJECTIVE], usual()).top is Cause.UNEXPLAINED
    proxied = row(AT + 1, **late)._replace(
        vantage=Vantage.JOINED,
        proxied=ProxyView(first_byte_s=2.0, streamed=True, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.05, tpot_s=0.01, e2e_s=0.15),
    )
    timeline = usual(proxied=ProxyView(first_byte_s=0.05), engine_view=EngineView(ttft_s=0.05))
    assert explain(proxied, [OBJECTIVE], timeline).top is Cause.NETWORK
    assert explain(front_row(**late), [OBJECTIVE], timeline).top is Cause.UNEXPLAINED


def test_a_front_without_a_processor_delays_the_stream_that_is_measured_in_it() -> None:
    timeline = usual()
    starve(timeline, -5, 6, ProcessRole.FRONT)
    slow = front_row(tpot_s=0.3, e2e_s=3.05)
    assert explain(slow, [OBJECTIVE], timeline, QUICK).top is Cause.CPU_STARVED
