"""Verdicts on requests, the limits that apply to them, and their excess."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf, nextafter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.joined_record import joined
from agent.analysis.verdicts import E2E, FAILURE, TPOT, TTFT, Judge, excesses, judge
from agent.catalog.definitions import DEFINITIONS, GOODPUT, Definition, Verdict
from agent.records.objective import Match, Objective
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.records.making import objective, record

MET, MISSED, UNDETERMINED = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED
MEASURES = ("ttft_s", "tpot_s", "e2e_s")
FAILURES = (Status.ERROR, Status.TIMEOUT, Status.THROTTLED)

every_measure = pytest.mark.parametrize("measure", MEASURES)


@every_measure
@given(limit_s=st.floats(1e-6, 1e4))
def test_a_value_equal_to_its_limit_meets_it_and_the_next_larger_one_misses(
    measure: str, limit_s: float
) -> None:
    limits = objective(**{measure: limit_s})
    assert judge(record(**{measure: limit_s}), limits) is MET
    assert judge(record(**{measure: nextafter(limit_s, inf)}), limits) is MISSED


@every_measure
def test_a_measure_without_a_limit_is_not_judged(measure: str) -> None:
    others = {name: 1.0 for name in MEASURES if name != measure}
    for figure_s in (1e6, None):
        assert judge(record(**{measure: figure_s}), objective(**others)) is MET


CANCELLED = {"status": Status.CANCELLED}
ONE_TOKEN = {"tpot_s": None, "output_tokens": 1}
NO_TOKEN = {"ttft_s": None, "tpot_s": None, "output_tokens": 0}


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        *(({"status": status}, MISSED) for status in FAILURES),
        *(({measure: None}, UNDETERMINED) for measure in MEASURES),
        # A broken limit is missed although other values are unknown.
        *(({**dict.fromkeys(MEASURES), measure: 9.0}, MISSED) for measure in MEASURES),
        # A limit on TPOT does not apply to a response of one token.
        (ONE_TOKEN, MET),
        *(({"tpot_s": None, "output_tokens": n}, UNDETERMINED) for n in (0, 2, None)),
        ({**ONE_TOKEN, "ttft_s": 0.3}, MISSED),
        # A cancelled request may miss, but is never met.
        (CANCELLED, UNDETERMINED),
        ({**CANCELLED, **ONE_TOKEN}, UNDETERMINED),
        ({**CANCELLED, **dict.fromkeys((*MEASURES, "output_tokens"))}, UNDETERMINED),
        *(({**CANCELLED, measure: 9.0}, MISSED) for measure in MEASURES),
        # Without a token it waited for one until its end.
        ({**CANCELLED, **NO_TOKEN, "e2e_s": 0.2}, UNDETERMINED),
        ({**CANCELLED, **NO_TOKEN, "e2e_s": nextafter(0.2, 1)}, MISSED),
        ({**CANCELLED, **NO_TOKEN, "e2e_s": 0.9, "output_tokens": None}, UNDETERMINED),
        (
            {**CANCELLED, **NO_TOKEN, "e2e_s": 0.9, "proxied": ProxyView(ttft_limit_s=5.0)},
            UNDETERMINED,
        ),
    ],
)
def test_the_verdict_on_a_request(values: dict[str, Any], verdict: Verdict) -> None:
    limits = objective(ttft_s=0.2, tpot_s=0.03, e2e_s=1.0)
    assert judge(record(**values), limits) is verdict


@pytest.mark.parametrize(
    ("compat", "verdicts"),
    [
        ("goodput", ()),
        # Load generators count every response but 200 as an error.
        ("aiperf", (("chat", MISSED),)),
        ("guidellm", (("chat", MISSED),)),
        ("vllm", (("chat", UNDETERMINED),)),
        ("inference-perf", (("chat", UNDETERMINED),)),
    ],
)
def test_a_clients_mistake_is_judged_as_the_load_generator_does(
    compat: str, verdicts: tuple[tuple[str, Verdict], ...]
) -> None:
    typo = record(status=Status.INVALID, ttft_s=None, tpot_s=None, e2e_s=0.002)
    for count_invalid, expected in ((None, verdicts), (False, ())):
        theirs = objective(definition=DEFINITIONS[compat], count_invalid=count_invalid)
        assert Judge((theirs,)).judgement(typo).by_objective == expected


def test_an_objective_may_count_a_clients_mistake() -> None:
    counting = Judge((objective(count_invalid=True),))
    assert counting.judgement(record(status=Status.INVALID)).by_objective == (("chat", MISSED),)


# Several objectives

FAST = objective("fast", ttft_s=0.05)
FAIR = objective("fair", ttft_s=0.2)
LOOSE = objective("loose", e2e_s=60.0)
OTHER = objective("other", match=Match(model="qwen*"))


def test_each_objective_has_its_own_verdict_in_the_order_of_the_settings() -> None:
    judgement = Judge((LOOSE, FAST, FAIR)).judgement(record())
    assert judgement.by_objective == (("loose", MET), ("fast", MISSED), ("fair", MET))


@pytest.mark.parametrize(
    ("covering", "other"),
    [
        (Match(model="llama"), Match(model="qwen*")),
        (Match(tenant="acme"), Match(tenant="globex")),
        (Match(route="/v1/*"), Match(route="/v2/*")),
        (Match(min_input_tokens=100), Match(max_input_tokens=99)),
    ],
)
def test_only_an_objective_that_covers_a_request_judges_it(covering: Match, other: Match) -> None:
    objectives = (objective("a", match=other), objective("b", match=covering, e2e_s=60.0))
    judgement = Judge(objectives).judgement(record(ttft_s=9.0, tenant="acme", route="/v1/chat"))
    assert judgement.by_objective == (("b", MET),)
    assert judgement.verdict is MET


@pytest.mark.parametrize("objectives", [(), (OTHER,)])
def test_a_request_without_an_objective_is_undetermined(objectives: tuple[Objective, ...]) -> None:
    judgement = Judge(objectives).judgement(record())
    assert (judgement.by_objective, judgement.verdict) == ((), UNDETERMINED)


@given(
    st.lists(st.sampled_from([0.05, 0.2, 0.0]), min_size=1, max_size=4).map(
        lambda limits: [
            objective(f"o{place}", **({"ttft_s": limit} if limit else {"tpot_s": 1.0}))
            for place, limit in enumerate(limits)
        ]
    )
)
def test_the_verdict_of_all_objectives_is_the_worst(objectives: list[Any]) -> None:
    judgement = Judge(objectives).judgement(record(ttft_s=0.1, tpot_s=None))
    verdicts = [verdict for _, verdict in judgement.by_objective]
    worst = next(verdict for verdict in (MISSED, UNDETERMINED, MET) if verdict in verdicts)
    assert judgement.verdict is worst


def test_a_judge_gives_equal_requests_the_same_judgement() -> None:
    objectives = (FAST, FAIR, OTHER)
    used = Judge(objectives)
    for request in [record(ttft_s=t, model=m) for t in (0.01, 0.1, 1) for m in ("a", "qwen")]:
        judgement = used.judgement(request)
        alone = Judge(objectives).judgement(request)
        assert (judgement.by_objective, judgement.verdict) == (alone.by_objective, alone.verdict)
        assert used.judged(request._replace(trace_id="f" * 32)).judgement is judgement
        assert used.missed(request) is (judgement.verdict is MISSED)


def test_an_objective_matches_what_the_client_wrote_where_figures_have_no_such_label() -> None:
    gold = objective("gold", match=Match(model="llama*", tenant="gold-*"))
    judge_gold = Judge((gold,))
    written = ProxyView(requested_model="llama-2", requested_tenant="gold-7")
    covered = record(model=None, tenant="other", proxied=written)
    assert judge_gold.judgement(covered).by_objective == (("gold", MET),)
    for stranger in (
        covered._replace(proxied=ProxyView(requested_model="llama-2", requested_tenant="iron-7")),
        covered._replace(proxied=ProxyView(requested_tenant="gold-7")),
        # The engine's span tells the model that served it.
        covered._replace(model="qwen"),
    ):
        assert judge_gold.judgement(stranger).by_objective == ()


# Limits that a client sent with its request


@pytest.mark.parametrize("measure", ["ttft_s", "tpot_s"])
@pytest.mark.parametrize(
    ("limit_s", "requested_s", "figure_s", "verdict"),
    [
        (0.1, 0.5, 0.5, MET),
        (0.1, 0.5, 0.6, MISSED),
        (0.1, 0.05, 0.08, MISSED),
        # An objective without this limit.
        (None, 0.2, 0.3, MISSED),
        (None, None, 0.3, MET),
    ],
)
def test_a_limit_of_the_request_replaces_the_objectives_and_no_other(
    measure: str,
    limit_s: float | None,
    requested_s: float | None,
    figure_s: float,
    verdict: Verdict,
) -> None:
    with_limit: dict[str, Any] = {measure.replace("_s", "_limit_s"): requested_s}
    request = record(**{measure: figure_s}, proxied=ProxyView(**with_limit))
    limits = objective(**{measure: limit_s}, e2e_s=60.0)
    used = Judge((limits,))
    assert judge(request, limits) is verdict
    assert judge(request._replace(e2e_s=61.0), limits) is MISSED
    # The limit of one request does not apply to the next.
    plain = request._replace(proxied=None)
    before = used.judgement(plain).verdict
    assert used.judgement(request).verdict is verdict
    assert used.judgement(plain).verdict is before


# Sums of these have no rounding.
seconds = st.integers(1, 2048).map(lambda n: n / 1024)
limits = st.none() | seconds


@dataclass(frozen=True, slots=True)
class Generated:
    """One response of an engine: the times at which its tokens were there, from its arrival."""

    tokens_s: tuple[float, ...]

    @property
    def engines(self) -> RequestRecord:
        """What the engine's span says of it."""
        first_s, last_s, tokens = self.tokens_s[0], self.tokens_s[-1], len(self.tokens_s)
        return record(
            1,
            vantage=Vantage.ENGINE,
            ttft_s=first_s,
            tpot_s=(last_s - first_s) / (tokens - 1) if tokens > 1 else None,
            e2e_s=last_s,
            output_tokens=tokens,
        )

    @property
    def proxied(self) -> RequestRecord:
        """What the proxy sees of it: everything at once at the end."""
        view = ProxyView(streamed=False, choices=1)
        e2e_s, tokens = self.tokens_s[-1], len(self.tokens_s)
        return record(
            1,
            vantage=Vantage.PROXY,
            ttft_s=None,
            tpot_s=None,
            e2e_s=e2e_s,
            output_tokens=tokens,
            proxied=view,
        )

    def is_met(self, promise: Objective) -> bool:
        """Whether it kept the promise, from the times of its tokens alone."""
        gaps = [later - earlier for earlier, later in pairwise(self.tokens_s)]
        mean_gap_s = sum(gaps) / len(gaps) if gaps else 0.0
        pairs = (
            (self.tokens_s[0], promise.ttft_s),
            (mean_gap_s, promise.tpot_s),
            (self.tokens_s[-1], promise.e2e_s),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


generated = st.lists(seconds, min_size=1, max_size=8).map(
    lambda gaps: Generated(tuple(accumulate(gaps)))
)


@given(generated, limits, limits, limits)
def test_the_proxy_changes_no_verdict_where_the_engine_sends_spans(
    response: Generated, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
) -> None:
    promise = objective("chat", ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
    with_proxy = joined(response.proxied, response.engines)
    assert judge(with_proxy, promise) is (MET if response.is_met(promise) else MISSED)
    for definition in DEFINITIONS.values():
        by_definition = replace(promise, definition=definition)
        assert judge(with_proxy, by_definition) is judge(response.engines, by_definition)


SLOW_TOKENS = Generated((0.5, 0.9, 1.5))


@pytest.mark.parametrize(
    ("promise", "verdict"),
    [
        ({"e2e_s": 1.5}, MET),
        ({"e2e_s": 1.4}, MISSED),
        ({"ttft_s": 0.2, "tpot_s": 0.1, "e2e_s": 1.5}, MET),
        ({"ttft_s": 9.0, "tpot_s": 9.0, "e2e_s": 1.4}, MISSED),
        ({"ttft_s": 9.0, "tpot_s": 9.0}, UNDETERMINED),
        ({"ttft_s": 9.0}, UNDETERMINED),
    ],
)
def test_without_a_span_the_limits_that_can_be_known_judge(
    promise: dict[str, float], verdict: Verdict
) -> None:
    assert judge(SLOW_TOKENS.proxied, objective("chat", **promise)) is verdict


def test_the_span_of_one_choice_does_not_judge_several() -> None:
    proxied = SLOW_TOKENS.proxied._replace(proxied=ProxyView(streamed=False, choices=2))
    both = joined(proxied, SLOW_TOKENS.engines)
    assert judge(both, objective("chat", ttft_s=0.2)) is UNDETERMINED
    assert judge(both, objective("chat", ttft_s=0.2, e2e_s=2.0)) is MET


@pytest.mark.parametrize(
    ("promise", "verdict"),
    [
        ({"ttft_s": 0.5, "tpot_s": 0.1}, MET),
        ({"ttft_s": 0.4, "tpot_s": 0.1}, MISSED),
        ({"ttft_s": 0.5, "tpot_s": 0.1, "e2e_s": 1.4}, MISSED),
        ({"tpot_s": 0.1}, UNDETERMINED),
    ],
)
def test_a_stream_of_several_choices_is_judged_without_tpot(
    promise: dict[str, float], verdict: Verdict
) -> None:
    view = ProxyView(streamed=True, choices=2)
    streamed = SLOW_TOKENS.proxied._replace(ttft_s=0.5, output_tokens=6, proxied=view)
    assert judge(streamed, objective("chat", **promise)) is verdict
    assert judge(joined(streamed, SLOW_TOKENS.engines), objective("chat", **promise)) is verdict


def test_a_stream_is_judged_by_all_limits() -> None:
    streamed = SLOW_TOKENS.proxied._replace(proxied=ProxyView(streamed=True, choices=1))
    both = joined(streamed, SLOW_TOKENS.engines)
    assert judge(both, objective("chat", ttft_s=9.0, e2e_s=2.0)) is UNDETERMINED


OBJECTIVE = objective(ttft_s=0.2, tpot_s=0.05, e2e_s=2.0)
RECORD = record(
    vantage=Vantage.PROXY,
    ttft_s=0.5,
    tpot_s=0.1,
    e2e_s=3.0,
    decode_s=None,
    output_tokens=11,
    proxied=ProxyView(streamed=True, choices=1),
)


WHOLE = {
    "vantage": Vantage.JOINED,
    "proxied": ProxyView(streamed=False, choices=1),
    "engine_view": EngineView(status=Status.OK, ttft_s=0.25, tpot_s=0.04, e2e_s=3.0),
}
STRICT = ProxyView(streamed=True, choices=1, ttft_limit_s=0.1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # TPOT: ten tokens after the first, each 50 ms over.
        ({}, {TTFT: 0.3, TPOT: 0.5, E2E: 1.0}),
        ({"proxied": STRICT}, {TTFT: 0.4, TPOT: 0.5, E2E: 1.0}),
        # A whole response is judged by the engine's own times.
        (WHOLE, {TTFT: 0.05, E2E: 1.0}),
        # 2.5 s after the first token at 100 ms each are 25 tokens, whether fewer or more have
        # been counted: of 1,001 most came before the first event.
        ({"output_tokens": 1001, "reasoning_tokens": 970}, {TTFT: 0.3, TPOT: 1.25, E2E: 1.0}),
        ({"output_tokens": None}, {TTFT: 0.3, TPOT: 1.25, E2E: 1.0}),
        # A client that left without a token waited for one until then.
        ({**CANCELLED, **NO_TOKEN, "e2e_s": 1.0}, {TTFT: 0.8}),
        *(({"status": status}, {FAILURE: None}) for status in FAILURES),
    ],
)
def test_each_broken_limit_has_its_excess(
    values: dict[str, Any], expected: dict[str, float | None]
) -> None:
    found = {each.limit: each.seconds for each in excesses(RECORD._replace(**values), OBJECTIVE)}
    assert found == pytest.approx(expected)


_latency = st.one_of(st.none(), st.floats(0.001, 10.0))


@given(
    st.sampled_from(list(DEFINITIONS.values())),
    st.fixed_dictionaries(dict.fromkeys(MEASURES, _latency)),
    st.fixed_dictionaries(dict.fromkeys(MEASURES, _latency)),
    st.sampled_from([Status.OK, Status.CANCELLED]),
    st.sampled_from([None, 0, 1, 9]),
)
def test_a_missed_request_has_an_excess_and_only_a_missed_one(
    definition: Definition,
    values: dict[str, Any],
    limits: dict[str, Any],
    status: Status,
    output_tokens: int | None,
) -> None:
    """The verdict is the oracle: a request without any broken limit is not missed by limits."""
    judged_by = replace(OBJECTIVE, definition=definition, **limits)
    request = RECORD._replace(status=status, output_tokens=output_tokens, **values)
    seconds = [each.seconds for each in excesses(request, judged_by)]
    if judge(request, judged_by) is not MISSED:
        assert definition is not GOODPUT or seconds == [None]
    elif definition is GOODPUT:
        assert all(value is not None and value > 0 for value in seconds)
    assert seconds
