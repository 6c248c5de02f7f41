"""What a case of an alert is, the healthy world around it, and the promtool tests of it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from urllib.parse import quote_plus

import yaml

from agent.render.alerts import render_alerts
from agent.render.alerts.alert_files import RULES, VLLM_ALONE
from agent.settings.settings_model import MatchSettings, ObjectiveSettings

WORDS = {
    "sum", "max", "min", "avg", "count", "by", "rate", "increase", "resets", "and", "or", "on",
    "histogram_quantile", "absent", "time", "vector", "max_over_time", "avg_over_time", "topk",
    "sort", "group_left", "scalar", "unless", "round", "last_over_time",
}  # fmt: skip
AGGREGATED = re.compile(r"\b(?:by|on|group_left) \(([\w, ]*)\)")
_RANGE = re.compile(r"\[\w+\]|offset \w+")
_NAME = re.compile(r'([a-zA-Z_][\w:]*)(\{(?:[^}"]|"[^"]*")*\})?')
_LABEL = re.compile(r'(\w+)(?:=~|!~|!=|=)(?:"[^"]*"|%q)')
# A matcher on what only a template knows.
_FILLED = re.compile(r"\w+=%q,?")


def _selectors(expression: str) -> Iterator[tuple[str, str]]:
    for name, inside in _NAME.findall(AGGREGATED.sub("", _RANGE.sub("", expression))):
        if name not in WORDS:
            yield name, inside


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that an expression selects, each with the labels of its matchers."""
    for name, inside in _selectors(expression):
        yield name, set(_LABEL.findall(inside))


def series_of(expression: str) -> Iterator[str]:
    """Each of its selectors, without the matchers that a template fills in."""
    for name, inside in _selectors(expression):
        known = _FILLED.sub("", inside)
        yield name if known in ("", "{}") else f"{name}{known}".replace(",}", "}")


_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def selects(selector: str, name: str, labels: Mapping[str, str]) -> bool:
    """Whether a selector matches a series."""
    wanted, _, inside = selector.partition("{")
    for label, operator, value in _MATCHER.findall(inside):
        pattern = value if operator.endswith("~") else re.escape(value)
        if bool(re.fullmatch(pattern, labels.get(label, ""))) is operator.startswith("!"):
            return False
    return name == wanted


def templates(rule: dict[str, Any]) -> Iterator[str]:
    for text in rule.get("annotations", {}).values():
        yield from re.findall(r"`(.*?)`", text)
        yield from re.findall(r'query "(.*?)"', text)


@cache
def rule_groups(text: str) -> list[dict[str, Any]]:
    """The groups of a rule file, to be read only: many tests ask for those of the same text."""
    groups: list[dict[str, Any]] = yaml.safe_load(text)["groups"]
    return groups


def alert_rules(text: str) -> list[dict[str, Any]]:
    return [rule for group in rule_groups(text) for rule in group["rules"] if "alert" in rule]


def expressions(document: dict[str, Any]) -> Iterator[str]:
    for group in document["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
            yield from templates(rule)


OBJECTIVES = tuple(
    objective.objective()
    for objective in (
        ObjectiveSettings(name="chat", preset="chat"),
        ObjectiveSettings(
            name="answers", match=MatchSettings(model="llama*"), e2e_ms=10_000, target=0.9
        ),
        ObjectiveSettings(
            name="strict", match=MatchSettings(tenant="acme"), ttft_ms=500, target=0.999
        ),
    )
)

Series = Mapping[str, str]

AGENT = 'job="agents",instance="a:9470"'
ENGINE = f'{AGENT},engine="chat-0"'
MODEL = f'{ENGINE},model="llama"'
GPU = f'{AGENT},gpu="GPU-1"'

ON_ENGINE = {"instance": "a:9470", "engine": "chat-0"}
ON_MODEL = {**ON_ENGINE, "model": "llama"}
ON_GPU = {"instance": "a:9470", "gpu": "GPU-1"}


BUDGET_USD = 2.5
TEXTS = render_alerts(OBJECTIVES, budget_usd=BUDGET_USD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An incident that one alert reports, and a similar one that no alert reports.

    At the three `minutes` the alert does not fire yet, fires, and is over. `figures` are what its
    description has in place of values and queries. `also` are other alerts that the same incident
    rightly brings, and `left` those that it leaves behind; what fires more than once counts so
    often.
    """

    alert: str
    incident: Series
    lookalike: Series
    minutes: tuple[int, int, int]
    labels: Mapping[str, str]
    figures: Sequence[str] = ()
    also: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)


_TIME = re.compile(r'\{\{ query "1000 \* \(?time\(\)(?: - (\d+)\))?" .*?\}\}')
_OF_LABEL = re.compile(r"\{\{ \$labels\.(\w+)( \| urlquery)? \}\}")
_SHARE = re.compile(r'\{\{ "([\d.]+)" \| humanizePercentage \}\}')
_FIGURE = re.compile(r"(?:\{\{ range .*?\{\{ end \}\})+|\{\{ .*?\}\}")


def expected(
    alert: str, at_min: int, labels: Mapping[str, str], figures: Sequence[str] = ()
) -> dict[str, Any]:
    """An alert with its texts: labels and figures in the templates of its rule."""
    (rule,) = (
        rule
        for file in (RULES, VLLM_ALONE)
        for rule in alert_rules(TEXTS[file])
        if rule["alert"] == alert and rule["labels"].items() <= labels.items()
    )
    left = iter(figures)

    def label(found: re.Match[str]) -> str:
        value = labels[found[1]]
        return quote_plus(value) if found[2] else value

    def text(name: str, template: str) -> str:
        template = _TIME.sub(lambda ago: str(1000 * (60 * at_min - int(ago[1] or 0))), template)
        template = _OF_LABEL.sub(label, template)
        template = _SHARE.sub(lambda share: f"{100 * float(share[1]):.4g}%", template)
        if name == "dashboard_url":
            return _FIGURE.sub("&var-engine=chat-0", template)
        return _FIGURE.sub(lambda _: next(left), template)

    texts = {name: text(name, template) for name, template in rule["annotations"].items()}
    assert list(left) == []
    return {"exp_labels": dict(labels), "exp_annotations": texts}


def firing(at: int, expected: Mapping[str, int], where: str = "") -> dict[str, Any]:
    """A check of which alerts fire at a minute, and how many of each; no others may.

    `where` narrows the check, as to the alerts on one instance.
    """
    matchers = f'alertstate="firing",alertname!="LlmWatchdog"{where}'
    return {
        "expr": f"count by (alertname) (ALERTS{{{matchers}}})",
        "eval_time": f"{at}m",
        "exp_samples": [
            {"labels": f'{{alertname="{name}"}}', "value": count}
            for name, count in sorted(expected.items())
        ],
    }


def play(
    name: str, series: Series, checks: Iterable[Mapping[str, Any]], *, step: str = "1m"
) -> dict[str, Any]:
    """A test of promtool: these series, a value each `step`, and checks of which alerts fire.

    A check that names an alert is one of its texts.
    """
    found = list(checks)
    return {
        "name": name,
        "interval": step,
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [check for check in found if "alertname" not in check],
        "alert_rule_test": [check for check in found if "alertname" in check],
    }


# Series, and the checks on them.
Scene = tuple[Series, list[dict[str, Any]]]


def incident(case: Case, where: str = "") -> Scene:
    """The alert fires with its texts, and ends."""
    before, at, after = case.minutes
    told = expected(case.alert, at, case.labels, case.figures)
    return case.incident, [
        firing(before, {}, where),
        firing(at, {case.alert: 1, **case.also}, where),
        firing(after, case.left, where),
        {"alertname": case.alert, "eval_time": f"{at}m", "exp_alerts": [told]},
    ]


def renamed(series: Series, old: str, new: str) -> Series:
    return {name.replace(old, new): values for name, values in series.items()}


def alerts_of(case: Case) -> set[str]:
    return {case.alert, *case.also, *case.left}


def elsewhere(case: Case, old: str, new: str) -> Case:
    """The same case, with another value of a label."""
    return replace(
        case,
        incident=renamed(case.incident, old, new),
        lookalike=renamed(case.lookalike, old, new),
        labels={name: value.replace(old, new) for name, value in case.labels.items()},
    )


def lookalike(case: Case, where: str = "") -> Scene:
    """No alert fires in the similar case."""
    return case.lookalike, [firing(minute, {}, where) for minute in case.minutes]


def of_groups(text: str, *names: str) -> str:
    """A rule file with some of its groups only: promtool's time goes by the number of rules."""
    return json.dumps({"groups": [each for each in rule_groups(text) if each["name"] in names]})


_OBJECTIVES = {
    f'llm_slo_requests_total{{{AGENT},objective="{objective.name}",engine="idle",model="idle",'
    f'verdict="{verdict}"}}': "0x1500"
    for objective in OBJECTIVES
    for verdict in ("met", "missed", "undetermined")
}


def configured(agent: str, value: int) -> Series:
    """Whether the objectives of an agent are those of its settings."""
    return {
        f'llm_slo_configured{{{agent},objective="{objective.name}"}}': f"{value}x1500"
        for objective in OBJECTIVES
    }


_PROMISED = {
    **{
        f'llm_slo_target_ratio{{{AGENT},objective="{objective.name}"}}': f"{objective.target}x1500"
        for objective in OBJECTIVES
    },
    **{
        f'llm_slo_limit_seconds{{{AGENT},objective="{objective.name}",measure="{measure}"}}': (
            f"{limit_s}x1500"
        )
        for objective in OBJECTIVES
        for measure, limit_s in (
            ("ttft", objective.ttft_s),
            ("tpot", objective.tpot_s),
            ("e2e", objective.e2e_s),
        )
        if limit_s is not None
    },
}

# An agent that is read, and publishes every objective, without any traffic. Another has presets.
AROUND: Series = {
    f"up{{{AGENT}}}": "1x1500",
    f'llm_agent_info{{{AGENT},agent="a",version="1",simulated="false"}}': "1x1500",
    **_OBJECTIVES,
    **_PROMISED,
    **configured(AGENT, 1),
    **configured('job="agents",instance="preset:9470"', 0),
}
