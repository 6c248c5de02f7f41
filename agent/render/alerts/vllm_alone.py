"""Rules for those who scrape vLLM and no agent, on vLLM's own names.

What no page of vLLM tells has no rule: requests that were given up or refused before their first
token, the reason of a death, goodput of one request over several limits.
"""

from collections.abc import Callable, Iterable, Iterator

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.objective import Objective
from agent.render.alerts.agent_alerts import watchdog
from agent.render.alerts.alert_conditions import conditions, share_over
from agent.render.alerts.alert_rule import Alert, Severity
from agent.render.alerts.timings import Timings
from agent.render.alerts.vllm_latency import vllm_latency_alerts
from agent.render.alerts.vllm_series import ON_ENGINE, ON_MODEL, ON_PAGE, own, spellings
from agent.render.promql import TARGET_LABELS, Matcher, by

_MINUTE_S = 60
_DAY_S = 24 * 60 * _MINUTE_S

_PAGES = ("VllmDown", "VllmSilent")


def _spelled(metric: Metric, shape: Callable[[str], str]) -> str:
    """The shape for each of the fact's names, the newest that an engine has."""
    return " or ".join(shape(own(series)) for series in spellings(metric))


_RUNNING = own(spellings(fact.REQUESTS_RUNNING)[0])
_WAITING = own(spellings(fact.REQUESTS_WAITING)[0])
_STEPS = own(spellings(fact.STEPS)[0])
_TOKENS = own(spellings(fact.OUTPUT_TOKENS)[0])
_ANSWERS = spellings(fact.REQUESTS_FAILED)[0]


def vllm_alerts(objectives: Iterable[Objective], timings: Timings) -> Iterator[Alert]:
    """Every alert for vLLM without an agent."""
    for objective in objectives:
        yield from vllm_latency_alerts(objective, timings)
    yield watchdog("vllm-alone")
    yield _down(timings)
    yield _missing()
    yield _silent(timings)
    yield _restarted(timings)
    yield _failing(timings)
    yield _deep_queue()
    yield _full_cache(timings)


def _seen_lately(series: str, window: str) -> str:
    return by(TARGET_LABELS, f"max_over_time({series}[{window}])", "max")


def _down(timings: Timings) -> Alert:
    lately = _seen_lately(_RUNNING, timings.window(_DAY_S))
    return Alert(
        name="VllmDown",
        severity=Severity.PAGE,
        expression=f"up == 0\nand on ({', '.join(TARGET_LABELS)})\n{lately}",
        hold_s=2 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} does not answer",
        description=f"Prometheus could not read its page for {timings.hold(2 * _MINUTE_S)}.",
        dashboard=None,
    )


def _missing() -> Alert:
    return Alert(
        name="VllmMissing",
        severity=Severity.PAGE,
        expression=f"absent({_RUNNING})",
        hold_s=5 * _MINUTE_S,
        summary="Prometheus sees no vLLM at all",
        description=f"No series {spellings(fact.REQUESTS_RUNNING)[0]} of an engine exists: none is "
        "scraped, every one is gone, or Ray publishes them under names of its own. All other "
        "alerts of this file are blind.",
        dashboard=None,
    )


def _silent(timings: Timings) -> Alert:
    window = timings.window(2 * _MINUTE_S)
    asleep = own(spellings(fact.AWAKE)[0], Matcher("sleep_state", 'sleep_state="awake"'))
    return Alert(
        name="VllmSilent",
        severity=Severity.PAGE,
        expression=conditions(
            f"{by(ON_ENGINE, _RUNNING)} + {by(ON_ENGINE, _WAITING)} > 0",
            f"{by(ON_ENGINE, f'rate({_STEPS}[{window}])')} == 0",
        )
        + f"\nunless\n{by(ON_ENGINE, asleep, 'max')} == 0",
        hold_s=3 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} has requests and gives no output",
        description="{{ $value | humanize }} requests run or wait, and for "
        f"{timings.hold(3 * _MINUTE_S)} no step gave output over {window}.",
        dashboard=None,
    )


def _restarted(timings: Timings) -> Alert:
    window = timings.window(15 * _MINUTE_S)
    # Whoever was paged knows that it starts anew.
    paged = (
        f'ALERTS{{alertname=~"{"|".join(_PAGES)}",alertstate="firing"}}'
        f"[{timings.window(20 * _MINUTE_S)}]"
    )
    return Alert(
        name="VllmRestarted",
        severity=Severity.TICKET,
        # A start time is missing where several processes share one page.
        expression=f"{by(ON_MODEL, f'resets({_TOKENS}[{window}])', 'max')} > 0\n"
        + f"unless on ({', '.join(ON_PAGE)})\n{by(ON_PAGE, f'max_over_time({paged})', 'max')}",
        hold_s=0.0,
        summary="vLLM at {{ $labels.instance }} restarted",
        description=f"Its count of generated tokens began anew {{{{ $value }}}} times over "
        f"{window}.",
        dashboard=None,
    )


def _failing(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    # Many programs publish this name; only those that are vLLM count.
    is_vllm = by(TARGET_LABELS, _RUNNING, "count")
    return Alert(
        name="VllmAnswersErrors",
        severity=Severity.PAGE,
        expression=share_over(
            "0.05",
            TARGET_LABELS,
            window,
            part=f'{_ANSWERS}{{status="5xx"}}',
            whole=(_ANSWERS,),
        )
        + f"\nand\n{is_vllm}",
        hold_s=2 * _MINUTE_S,
        summary="vLLM at {{ $labels.instance }} answers with errors",
        description=f"{{{{ $value | humanizePercentage }}}} of the answers over {window} were 5xx. "
        "A stream that broke after its 200 is not among them.",
        dashboard=None,
    )


def _deep_queue() -> Alert:
    return Alert(
        name="VllmQueueDeep",
        severity=Severity.TICKET,
        expression=f"{by(ON_MODEL, _WAITING)} > 10",
        hold_s=5 * _MINUTE_S,
        summary="Requests to {{ $labels.model_name }} queue up at {{ $labels.instance }}",
        description="{{ $value | humanize }} requests wait for a place in the batch.",
        dashboard=None,
    )


def _full_cache(timings: Timings) -> Alert:
    window = timings.window(5 * _MINUTE_S)
    usage = _spelled(fact.KV_CACHE_USAGE, lambda series: by(ON_ENGINE, series, "max"))
    preempted = by(ON_ENGINE, f"rate({own(spellings(fact.PREEMPTIONS)[0])}[{window}])")
    return Alert(
        name="VllmKvCacheSaturated",
        severity=Severity.TICKET,
        expression=conditions(
            f"({usage}) > 0.95",
            f"({by(ON_ENGINE, _WAITING)} > 0 or {preempted} > 0)",
        ),
        hold_s=5 * _MINUTE_S,
        summary="The KV cache of {{ $labels.instance }} is too small for its load",
        description="{{ $value | humanizePercentage }} of the KV cache is held by live requests, "
        "while others wait for it or start over. They get slower; no memory runs out.",
        dashboard=None,
    )
