"""Cases of alerts on objectives and latencies."""

from tests.render.alerts.cases import ENGINE, MODEL, ON_MODEL, Case, Series

ON_CHAT = {"objective": "chat", "model": "llama", "severity": "page"}
_WORST = "&var-engine=chat-0"


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


def _queue(within: str, count: str) -> Series:
    return histogram("llm_request_queue_seconds", MODEL, {"0.1": within, "0.15": count}, count)


_OVER = {**ON_MODEL, "severity": "ticket", "objective": "chat"}

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
        before=22,
        at=30,
        after=60,
        labels=ON_CHAT,
        summary="Most requests to llama miss objective chat",
        description="100% of the judged requests to llama missed objective chat over 5m; 5 % is "
        "allowed. "
        "Most of them now on engine chat-0. "
        "Most of their excess seconds over 5m (75%): prefill interference.",
        filled=("objective", "model"),
        further=_WORST,
        # Prometheus knows no more than these minutes, so that all windows are short.
        also={"LlmObjectiveBudgetBurn": 2},
        left={"LlmObjectiveBudgetBurn": 2},
    ),
    Case(
        alert="LlmVerdictsUndetermined",
        incident=verdicts("chat", "0+1x100", "0x100", "0+9x40 360+0x60"),
        lookalike=verdicts("chat", "0+6x100", "0x100", "0+4x40 160+0x60"),
        before=4,
        at=30,
        after=85,
        labels={"objective": "chat", "model": "llama", "severity": "ticket"},
        summary="Most requests to llama cannot be judged by objective chat",
        description="90% of the requests to llama over 30m are undetermined, so the attainment of "
        "objective chat covers few of them. Most of them now on engine "
        "chat-0.",
        filled=("objective", "model"),
        further=_WORST,
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
        before=20,
        at=30,
        after=60,
        labels={**ON_CHAT, "severity": "none"},
        summary="Requests to llama miss objective chat on engines that have pages of their own",
        description="100% of the misses over 5m are of engines with a firing page. This alert is "
        "sent to no receiver; from 90 % on it mutes the pages on the objective.",
        filled=("objective", "model"),
        # Of these only the first is a page; there are also tickets.
        also={
            "LlmEngineDied": 1,
            "LlmEngineDown": 1,
            "LlmObjectiveOutage": 1,
            "LlmObjectiveBudgetBurn": 2,
        },
        left={"LlmObjectiveBudgetBurn": 2},
    ),
)

LATENCIES = (
    Case(
        alert="LlmTtftOverLimit",
        incident=_ttft("0+6x20 120+10x40", "0+10x60"),
        # 95 of 100 within the limit is what was promised.
        lookalike=_ttft("0+95x60", "0+100x60"),
        before=1,
        at=20,
        after=40,
        labels={**_OVER, "vantage": "engine"},
        summary="The p95 of time to first token of llama on chat-0 is over the limit of objective "
        "chat",
        description="The p95 of time to first token over 10m is about 375ms, taken at the engine; "
        "95 % of the requests must stay within 200 ms.",
        filled=("objective", "engine", "model"),
    ),
    Case(
        alert="LlmTpotOverLimit",
        incident=_tpot("0+8x20 160+10x40", "0+10x60"),
        # Few requests are no traffic to judge by.
        lookalike=_tpot("0x60", "0x25 1x2 2x2 3x2 4x60"),
        before=1,
        at=20,
        after=40,
        labels={**_OVER, "vantage": "proxy"},
        summary="The p95 of time per output token of llama on chat-0 is over the limit of "
        "objective chat",
        description="The p95 of time per output token over 10m is about 180ms, taken at the proxy; "
        "95 % of the requests must stay within 120 ms.",
        filled=("objective", "engine", "model"),
    ),
    Case(
        alert="LlmDurationOverLimit",
        incident=_duration("0+8x20 160+10x40", "0+10x60"),
        # The objective speaks of models whose names begin with llama.
        lookalike={
            key.replace('"llama"', '"qwen"'): values
            for key, values in _duration("0+8x60", "0+10x60").items()
        },
        before=1,
        at=20,
        after=40,
        labels={**_OVER, "objective": "answers", "vantage": "proxy"},
        summary="The p90 of end-to-end time of llama on chat-0 is over the limit of objective "
        "answers",
        description="The p90 of end-to-end time over 10m is about 10s, taken at the proxy; 90 % of "
        "the requests must stay within 10 s.",
        filled=("objective", "engine", "model"),
    ),
    Case(
        alert="LlmQueueTimeHigh",
        incident=_queue("0+8x20 160+10x40", "0+10x60"),
        lookalike=_queue("0+96x60", "0+100x60"),
        before=1,
        at=20,
        after=40,
        labels=_OVER,
        summary="Requests to llama on chat-0 spend the time that objective chat gives them in the "
        "queue",
        description="The p95 of the time in the queue over 10m is about 137.5ms, more than 100 ms "
        "of the 200 ms to the first token.",
        filled=("objective", "engine", "model"),
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
        before=1,
        at=25,
        after=100,
        labels=_OVER,
        summary="More requests to llama on chat-0 fail than objective chat allows",
        description="1% of the requests over 1h failed; objective chat allows 0.1 %.",
        filled=("objective", "engine", "model"),
    ),
)
