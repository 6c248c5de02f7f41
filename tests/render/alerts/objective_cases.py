"""Cases of the alerts on objectives, and long courses of their error budgets."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.render.alerts.cases import (
    AGENT,
    AROUND,
    ENGINE,
    MODEL,
    ON_MODEL,
    Case,
    Series,
    expected,
    play,
)

ON_CHAT = {"objective": "chat", "model": "llama", "severity": "critical"}
PAGED = "LlmObjectivePagedLately"
_ON_CHAT_0 = " Most of them now on engine chat-0."
_MOST = " Most of their excess seconds over {} (75%): "


def verdicts(objective: str, met: str, missed: str, undetermined: str = "0x600") -> Series:
    """The counters of an objective on chat-0."""
    labels = f'llm_slo_requests_total{{{MODEL},objective="{objective}",verdict='
    return {
        f'{labels}"met"}}': met,
        f'{labels}"missed"}}': missed,
        f'{labels}"undetermined"}}': undetermined,
    }


def excess(cause: str, limit: str, seconds: str, objective: str = "chat") -> Series:
    """The excess seconds of a cause over a limit of an objective on chat-0."""
    labels = f'{MODEL},objective="{objective}",limit="{limit}",cause="{cause}"'
    return {f"llm_slo_missed_seconds_total{{{labels}}}": seconds}


def histogram(name: str, labels: str, buckets: dict[str, str], count: str) -> Series:
    """The buckets and the count of a histogram, `+Inf` by itself."""
    series = {
        f'{name}_bucket{{{labels},le="{bound}"}}': values for bound, values in buckets.items()
    }
    return {
        **series,
        f'{name}_bucket{{{labels},le="+Inf"}}': count,
        f"{name}_count{{{labels}}}": count,
    }


def _ttft(within: str, count: str) -> Series:
    at_engine = f'{MODEL},vantage="engine"'
    name = "gen_ai_server_time_to_first_token_seconds"
    return histogram(name, at_engine, {"0.2": within, "0.4": count}, count)


def _tpot(within: str, count: str) -> Series:
    at_proxy = f'{MODEL},vantage="proxy"'
    name = "gen_ai_server_time_per_output_token_seconds"
    return histogram(name, at_proxy, {"0.12": within, "0.2": count}, count)


def _duration(within: str, count: str) -> Series:
    at_proxy = f'{MODEL},vantage="proxy"'
    # Ten seconds is the highest edge, so nothing slower has a percentile of its own.
    return histogram("gen_ai_server_request_duration_seconds", at_proxy, {"10.0": within}, count)


def _of_engine(perhaps: str, above: str, measure: str = "ttft") -> Series:
    labels = f'{MODEL},objective="chat",measure="{measure}"'
    name = "llm_slo_engine_requests_total"
    return {
        f'{name}{{{labels},within="yes"}}': "0x100",
        f'{name}{{{labels},within="perhaps"}}': perhaps,
        f'{name}{{{labels},within="no"}}': above,
    }


def _queue(within: str, count: str) -> Series:
    return histogram("llm_request_queue_seconds", MODEL, {"0.1": within, "0.15": count}, count)


_OVER = {**ON_MODEL, "severity": "warning", "objective": "chat"}

BUDGETS = (
    Case(
        alert="LlmObjectiveOutage",
        incident={
            **verdicts("chat", "0+60x20 1200+0x20 1200+60x60", "0x20 0+60x20 1200+0x60"),
            **excess("prefill_interference", "ttft", "0x20 0+30x20 600+0x60"),
            **excess("prefill_interference", "tpot", "0x20 0+30x20 600+0x60"),
            **excess("kv_pressure", "ttft", "0x20 0+20x20 400+0x60"),
        },
        lookalike=verdicts("chat", "0+96x100", "0+4x100"),
        minutes=(22, 30, 60),
        labels=ON_CHAT,
        figures=(
            "100%",
            "5%",
            f"{_ON_CHAT_0}{_MOST.format('5m')}prefill interference.",
        ),
        # Prometheus knows no more than these minutes, so that all windows are short.
        also={"LlmObjectiveBudgetBurn": 2, PAGED: 1},
        left={"LlmObjectiveBudgetBurn": 3, PAGED: 1},
    ),
    Case(
        alert=PAGED,
        incident=verdicts("chat", "0+60x20 1200+0x20 1200+60x160", "0x20 0+60x20 1200+0x160"),
        lookalike=verdicts("chat", "0+96x100", "0+4x100"),
        # It goes on for half an hour after the outage.
        minutes=(21, 30, 90),
        labels={**ON_CHAT, "severity": "info"},
        also={"LlmObjectiveBudgetBurn": 2, "LlmObjectiveOutage": 1},
        left={"LlmObjectiveBudgetBurn": 2},
    ),
    Case(
        alert="LlmVerdictsUndetermined",
        incident=verdicts("chat", "0+1x100", "0x100", "0+9x40 360+0x60"),
        lookalike=verdicts("chat", "0+6x100", "0x100", "0+4x40 160+0x60"),
        minutes=(4, 30, 85),
        labels={"objective": "chat", "model": "llama", "severity": "warning"},
        figures=("90%", _ON_CHAT_0),
    ),
)

# Beside the rules on engines.
EXPLAINED = (
    Case(
        alert="LlmMissesExplained",
        incident={
            **verdicts("chat", "0+60x20 1200x20 1200+60x60", "0x20 0+60x20 1200x60"),
            f'llm_engine_events_total{{{ENGINE},kind="ENGINE_DEAD"}}': "0x20 1x80",
            f"llm_engine_up{{{ENGINE}}}": "1x20 0x20 1x60",
        },
        # It works, and misses what it may.
        lookalike=verdicts("chat", "0+96x100", "0+4x100"),
        minutes=(20, 30, 60),
        labels={**ON_CHAT, "severity": "info"},
        figures=("100%",),
        # Of these only the first is a page; there are also tickets.
        also={
            "LlmEngineDied": 1,
            "LlmEngineDown": 1,
            "LlmObjectiveOutage": 1,
            "LlmObjectiveBudgetBurn": 2,
            PAGED: 1,
        },
        left={"LlmObjectiveBudgetBurn": 3, PAGED: 1},
    ),
)

LATENCIES = (
    Case(
        alert="LlmTtftOverLimit",
        incident=_ttft("0+6x20 120+10x40", "0+10x60"),
        # 95 of 100 within the limit is what was promised.
        lookalike=_ttft("0+95x60", "0+100x60"),
        minutes=(1, 20, 40),
        labels={**_OVER, "vantage": "engine"},
        figures=("375ms",),
    ),
    Case(
        alert="LlmTpotOverLimit",
        incident=_tpot("0+8x20 160+10x40", "0+10x60"),
        # Few requests are no traffic to judge by.
        lookalike=_tpot("0x60", "0x25 1x2 2x2 3x2 4x60"),
        minutes=(1, 20, 40),
        labels={**_OVER, "vantage": "proxy"},
        figures=("180ms",),
    ),
    Case(
        alert="LlmDurationOverLimit",
        incident=_duration("0+8x20 160+10x40", "0+10x60"),
        # The objective speaks of models whose names begin with llama.
        lookalike={
            key.replace('"llama"', '"qwen"'): values
            for key, values in _duration("0+8x60", "0+10x60").items()
        },
        minutes=(1, 20, 40),
        labels={**_OVER, "objective": "answers", "vantage": "proxy"},
        figures=("10s",),
    ),
    Case(
        alert="LlmQueueTimeHigh",
        incident=_queue("0+8x20 160+10x40", "0+10x60"),
        lookalike=_queue("0+96x60", "0+100x60"),
        minutes=(1, 20, 40),
        labels=_OVER,
        figures=("137.5ms",),
    ),
    Case(
        alert="LlmEngineMissesObjective",
        # One of two limits is missed surely.
        incident={
            **_of_engine("0+8x20 160+10x40", "0+2x20 40x40"),
            # A single measurement above a limit is no incident.
            **_of_engine("0x60", "0x10 1x60", "tpot"),
        },
        # Where requests have rows, these have the last word.
        lookalike={
            **_of_engine("0+8x60", "0+2x60"),
            **verdicts("chat", "0+10x60", "0x60"),
        },
        minutes=(1, 20, 40),
        labels=_OVER,
        figures=("80%",),
    ),
    Case(
        alert="LlmErrorRatioOverLimit",
        incident={
            f'llm_requests_total{{{MODEL},status="ok"}}': "0+990x150",
            f'llm_requests_total{{{MODEL},status="throttled"}}': "0+9x30 270+0x120",
            f'llm_requests_total{{{MODEL},status="error"}}': "0+1x30 30+0x120",
        },
        lookalike={
            f'llm_requests_total{{{MODEL},status="ok"}}': "0+990x150",
            f'llm_requests_total{{{MODEL},status="error"}}': "0x20 1x150",
            f'llm_requests_total{{{MODEL},status="cancelled"}}': "0+90x150",
        },
        minutes=(1, 25, 100),
        labels=_OVER,
        figures=("1%",),
    ),
)


def tiers(at: str, *expected: tuple[str, str]) -> dict[str, Any]:
    """A check that these tiers of objectives are sent at a time, and no others; an outage has none.

    The second is not if Alertmanager mutes it (test_alertmanager.py).
    """
    samples = [
        {
            "labels": f'{{objective="{objective}"' + (f',tier="{tier}"}}' if tier else "}"),
            "value": 1,
        }
        for objective, tier in expected
    ]
    names = 'alertname=~"LlmObjectiveBudgetBurn|LlmObjectiveOutage"'
    fire = 'ALERTS{alertstate="firing",model="llama",%s}'
    unmuted = f"""{fire % f'{names},tier!="2"'} or {fire % f'{names},tier="2"'}
        unless on (objective) {fire % 'alertname="LlmObjectivePagedLately"'}"""
    return {
        "expr": f"count by (objective, tier) ({unmuted})",
        "eval_time": at,
        "exp_samples": samples,
    }


def _all(objective: str, numbers: str) -> Iterator[tuple[str, str]]:
    yield from ((objective, number) for number in numbers)


_ALLOWED = {"chat": "5%", "answers": "10%", "strict": "0.1%"}
_SEVERITIES = {"1": "critical", "2": "critical", "3": "warning", "4": "warning"}


def _told(
    at_min: int, objective: str, missed: Mapping[str, str], causes: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A check of all alerts on an objective at a minute, with what is missed by tier.

    `causes` say what most of the excess seconds come from, by tier.
    """
    where = {"objective": objective, "model": "llama"}
    alerts = [
        expected(
            "LlmObjectiveBudgetBurn",
            at_min,
            {**where, "severity": _SEVERITIES[tier], "tier": tier},
            (share, _ALLOWED[objective], _ON_CHAT_0 + (causes or {}).get(tier, "")),
        )
        for tier, share in missed.items()
    ]
    return {
        "alertname": "LlmObjectiveBudgetBurn",
        "eval_time": f"{at_min}m",
        "exp_alerts": alerts,
    }


def burn_plays() -> list[dict[str, Any]]:
    """The tests of promtool on the tiers, for rules that are looked at every five minutes."""
    return [
        _at_once(_speeds()),
        _slow_burn(),
        _at_once(_edges()),
        _at_once(_leaks()),
        _at_once((*_targets(), *_changes())),
    ]


def _at_once(tests: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One test of all of these, each on a model of its own."""
    series: dict[str, str] = {}
    checks: list[dict[str, Any]] = []
    texts: dict[tuple[str, str], dict[str, Any]] = {}
    name = step = ""
    for number, test in enumerate(tests):
        moved = json.loads(json.dumps(test).replace("llama", f"llama-{number}"))
        series |= {each["series"]: each["values"] for each in moved["input_series"]}
        checks += moved["promql_expr_test"]
        for check in moved["alert_rule_test"]:
            of_all = texts.setdefault((check["alertname"], check["eval_time"]), check)
            if of_all is not check:
                of_all["exp_alerts"] += check["exp_alerts"]
        name, step = f"{name}; {number}: {test['name']}", test["interval"]
    return play(name, series, [*checks, *texts.values()], step=step)


def _named(
    name: str, series: Series, *checks: Mapping[str, Any], step: str = "1m"
) -> dict[str, Any]:
    """A test amid agents without other traffic."""
    return play(name, {**AROUND, **series}, checks, step=step)


# Those of another objective are not meant.
_CAUSES = {
    **excess("kv_pressure", "ttft", "0x720 0+3x500", "strict"),
    **excess("burst", "ttft", "0x720 0+1x500", "strict"),
    **excess("burst", "ttft", "0x720 0+90x500", "answers"),
}
_KV = "kv pressure."


def _speeds() -> Iterator[dict[str, Any]]:
    # Prometheus knows twelve hours here, so the ticket of three days comes sooner than it would.
    total = verdicts("chat", "0+100x720 72000x60", "0x720 0+100x60 6000x300")
    yield _named(
        "a total failure at 95 %: the outage at once, the first tier only after 43 minutes",
        total,
        tiers("12h"),
        tiers("12h10m", ("chat", "")),
        tiers("12h40m", ("chat", "")),
        tiers("12h50m", ("chat", ""), *_all("chat", "14")),
        _told(770, "chat", {"1": "83.05%", "4": "6.372%"}),
        # The short window ends it soon after the failure does.
        tiers("13h20m", ("chat", "4")),
    )
    yield _named(
        "half of the requests at 95 %: the second tier after three and a half hours",
        verdicts("chat", "0+100x720 72000+50x300 87000+100x300", "0x720 0+50x300 15000x300"),
        tiers("15h", ("chat", "4")),
        tiers("15h45m", *_all("chat", "24")),
        tiers("17h45m", ("chat", "4")),
    )
    yield _named(
        "a total failure at 90 %: the outage, which stands for the tier that cannot fire",
        verdicts("answers", "0+100x720 72000x200", "0x720 0+100x200"),
        tiers("12h10m", ("answers", "")),
        tiers("14h", ("answers", ""), ("answers", "4")),
    )


def _slow_burn() -> dict[str, Any]:
    return _named(
        "a hundredth at 99.9 %: no page of the first tier, one of the second",
        {**verdicts("strict", "0+100x720 72000+99x500", "0x720 0+1x500"), **_CAUSES},
        tiers("13h"),
        tiers("17h", *_all("strict", "24")),
        _told(
            1020,
            "strict",
            {"2": "0.8329%", "4": "0.2934%"},
            {"2": _MOST.format("30m") + _KV, "4": _MOST.format("6h") + _KV},
        ),
    )


def _recorded(at: str, *values: float) -> dict[str, Any]:
    """A check of the recorded share of misses over five minutes."""
    labels = (
        '{__name__="objective_model:llm_slo_missed:ratio_rate5m",model="llama",objective="chat"}'
    )
    samples = [{"labels": labels, "value": value} for value in values]
    return {
        "expr": 'objective_model:llm_slo_missed:ratio_rate5m{model="llama",objective="chat"}',
        "eval_time": at,
        "exp_samples": samples,
    }


def _edges() -> Iterator[dict[str, Any]]:
    yield _named(
        "no share is recorded where nothing was asked: 0/0 would spoil every average over it",
        verdicts("chat", "0+75x60 4500x60", "0+25x60 1500x60"),
        _recorded("30m", 0.25),
        _recorded("1h30m"),
    )
    yield _named(
        "exactly what the target allows",
        verdicts("chat", "0+95x400", "0+5x400"),
        *(tiers(at) for at in ("1h", "6h")),
    )
    yield _named(
        "four requests of four: no traffic to wake anybody for",
        verdicts("chat", "0x400", "0x100 1 2 3 4x300"),
        *(tiers(at) for at in ("1h45m", "2h30m", "6h")),
    )
    yield _named(
        "a restart of the agent amid a failure: it counts from zero, and the alert stays",
        verdicts("chat", "0+100x30 3000x29 0x60", "0x30 0+100x29 0+100x60"),
        tiers("1h", ("chat", ""), *_all("chat", "34")),
        tiers("1h5m", ("chat", ""), *_all("chat", "34")),
        tiers("1h50m", ("chat", ""), *_all("chat", "134")),
    )
    yield _named(
        "a restart of the agent in health",
        verdicts("chat", "0+100x60 0+100x60", "0+1x60 0+1x60"),
        *(tiers(at) for at in ("1h", "1h5m", "1h30m")),
    )
    yield _named(
        "no traffic any more: what nobody asks for cannot be missed",
        verdicts("chat", "0x300", "0+100x60 6000x240"),
        tiers("59m", ("chat", ""), *_all("chat", "134")),
        # The half hour of the second tier is full of what has just been paged for.
        tiers("1h10m", *_all("chat", "34")),
        tiers("2h", *_all("chat", "34")),
        tiers("4h", *_all("chat", "4")),
    )


def _leaks() -> Iterator[dict[str, Any]]:
    yield _named(
        "a slow leak at 95 %: tickets, and no page",
        verdicts("chat", "0+80x400", "0+20x400"),
        tiers("6h30m", *_all("chat", "34")),
        _told(390, "chat", {"3": "20%", "4": "20%"}),
    )
    yield _named(
        "a slower leak at 95 %: the last ticket alone",
        verdicts("chat", "0+93x400", "0+7x400"),
        tiers("6h30m", ("chat", "4")),
        _told(390, "chat", {"4": "7%"}),
    )


def target(objective: str, values: str, agent: str = AGENT) -> Series:
    """The target that an agent publishes."""
    return {f'llm_slo_target_ratio{{{agent},objective="{objective}"}}': values}


def _targets() -> Iterator[dict[str, Any]]:
    """The rules are made for other objectives than those that agents have."""
    tenth = ("0+90x800", "0+10x800")
    yield _named(
        "a tenth of the requests, at two targets: 10 times and 100 times what they allow",
        {
            **verdicts("two-nines", *tenth),
            **target("two-nines", "0.99x800"),
            **verdicts("three-nines", *tenth),
            **target("three-nines", "0.999x800"),
        },
        # Of the faster one the first tier pages, and stands for the second.
        tiers("1h10m", *_all("three-nines", "134"), *_all("two-nines", "234")),
    )
    yield _named(
        "an objective that appears later, with an outage of its own",
        {
            **verdicts("late", "_x300 0+100x30 3000x470", "_x300 0x30 0+100x470"),
            **target("late", "_x300 0.9x500"),
        },
        tiers("5h20m"),
        tiers("5h40m", ("late", ""), ("late", "4")),
    )
    yield _named(
        "without a target nothing fires, as LlmObjectiveTargetMissing says",
        verdicts("unknown", "0+20x800", "0+80x800"),
        tiers("6h30m"),
    )


def _changes() -> Iterator[dict[str, Any]]:
    yield _named(
        "a target that changes, and one that is gone with its agent: 20 % are 4 times 5 %",
        {
            **verdicts("moved", "0+80x800", "0+20x800"),
            **target("moved", "0.75x300 0.95x500"),
            **verdicts("gone", "0+80x800", "0+20x800"),
            **target("gone", "0.95x300 _x500"),
        },
        tiers("5h", *_all("gone", "34")),
        tiers("5h20m", *_all("gone", "34"), *_all("moved", "34")),
        # For as long as the windows hold its misses.
        tiers("10h", *_all("gone", "34"), *_all("moved", "34")),
        tiers("11h30m", *_all("moved", "34")),
    )
    yield _named(
        "agents that disagree: the strictest target counts",
        {
            **verdicts("both", "0+93x800", "0+7x800"),
            **target("both", "0.9x800"),
            **target("both", "0.95x800", 'job="agents",instance="b:9470"'),
        },
        tiers("6h30m", *_all("both", "4")),
    )
