"""Objectives as documents of OpenSLO, Sloth and Pyrra, and objectives from those of OpenSLO.

OpenSLO has no words for limits on a request: they are annotations, by the keys of the settings.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import yaml
from pydantic import ValidationError

from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S
from agent.errors import SettingsInvalid
from agent.render.alerts.alert_rule import number
from agent.render.promql import Matcher, among, eq, value_of
from agent.settings.settings_model import ObjectiveSettings

PREFIX = "objective.goodput-agent/"
VERSION = "openslo/v1"
# Of the settings, what OpenSLO has fields for.
_IN_FIELDS = {"target", "window"}
_UNITS_S = {"m": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
# The name of an object: RFC 1123.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# The limit that a query on a latency is about.
_LATENCIES = {
    "time_to_first_token_seconds": "ttft_ms",
    "time_per_output_token_seconds": "tpot_ms",
    "inter_token_latency_seconds": "tpot_ms",
    "request_duration_seconds": "e2e_ms",
    "e2e_request_latency_seconds": "e2e_ms",
}
_TEXTS = {"name", "preset", "compat", "match.model", "match.tenant", "match.route"}
_ALERTS = {"AlertPolicy", "AlertCondition", "AlertNotificationTarget"}
_IGNORED = {"Service", "DataSource", "SLI", *_ALERTS}

Document = Mapping[str, Any]


def openslo(objectives: Sequence[ObjectiveSettings], service: str) -> list[Document]:
    """A Service and an SLO for each objective. Raises SettingsInvalid."""
    documents: list[Document] = [_document("Service", service, {"description": "LLM inference"})]
    return documents + [_slo(each, service) for each in _named_once(objectives)]


def _slo(objective: ObjectiveSettings, service: str) -> Document:
    indicator = {
        "metadata": {"name": f"{_name_of(objective)[:57]}-ratio"},
        "spec": {
            "ratioMetric": {
                "counter": True,
                "good": _source(objective, eq("verdict", Verdict.MET)),
                "total": _source(objective, _JUDGED),
            }
        },
    }
    spec = {
        "description": _description(objective),
        "service": service,
        "indicator": indicator,
        "timeWindow": [{"duration": _shorthand(objective), "isRolling": True}],
        "budgetingMethod": "Occurrences",
        "objectives": [{"displayName": objective.name, "target": objective.target}],
    }
    annotations = dict(_annotations(objective))
    return _document("SLO", _name_of(objective), spec, annotations=annotations)


def _document(kind: str, name: str, spec: Document, **metadata: Any) -> Document:
    if not _NAME.fullmatch(name):
        raise SettingsInvalid(
            [
                f"{kind} {name!r}: a name has at most 63 lower-case letters, digits and dashes, "
                "and begins and ends without a dash"
            ]
        )
    return {
        "apiVersion": VERSION,
        "kind": kind,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }


def _source(objective: ObjectiveSettings, verdict: Matcher) -> Document:
    query = f"sum({_counter(objective, verdict)})"
    return {"metricSource": {"type": "Prometheus", "spec": {"query": query}}}


_JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))


def _counter(objective: ObjectiveSettings, verdict: Matcher) -> str:
    return value_of(m.SLO_REQUESTS, eq("objective", objective.name), verdict)


def _name_of(objective: ObjectiveSettings) -> str:
    return re.sub(r"[^a-z0-9]+", "-", objective.name.lower()).strip("-")


def _named_once(objectives: Sequence[ObjectiveSettings]) -> Sequence[ObjectiveSettings]:
    names: dict[str, str] = {}
    for objective in objectives:
        name = _name_of(objective)
        if name in names:
            raise SettingsInvalid(
                [f"objectives {names[name]!r} and {objective.name!r} would both be called {name!r}"]
            )
        names[name] = objective.name
    return objectives


def _shorthand(objective: ObjectiveSettings) -> str:
    for unit in ("d", "h", "m"):
        count, rest = divmod(objective.window, _UNITS_S[unit])
        if count and not rest:
            return f"{count:.0f}{unit}"
    raise SettingsInvalid(
        [
            f"objective {objective.name!r}: window is {objective.window:g} s, and OpenSLO has no "
            "unit below a minute"
        ]
    )


def _description(objective: ObjectiveSettings) -> str:
    limits = [
        f"{label} within {number(value)} ms"
        for label, value in (
            ("TTFT", objective.ttft_ms),
            ("TPOT", objective.tpot_ms),
            ("end-to-end time", objective.e2e_ms),
        )
        if value is not None
    ]
    return f"Requests with {' and '.join(limits)}, as goodput-agent judges them."


def _annotations(objective: ObjectiveSettings) -> Iterator[tuple[str, str]]:
    given = objective.model_dump(mode="json", exclude_defaults=True)
    # A preset gave its limits already.
    for key in _IN_FIELDS | {"preset"}:
        given.pop(key, None)
    for key, value in given.items():
        inner = value.items() if isinstance(value, Mapping) else ((None, value),)
        for below, each in inner:
            if each is not None:
                path = key if below is None else f"{key}.{below}"
                # A limit of 500.0 is written as 500; a name such as llama-2.0 is kept.
                text = each if isinstance(each, str) else json.dumps(each).removesuffix(".0")
                yield f"{PREFIX}{path}", text


def sloth(objectives: Sequence[ObjectiveSettings], service: str) -> list[Document]:
    """One file for Sloth. Raises SettingsInvalid."""
    windows = {_shorthand(objective) for objective in _named_once(objectives)}
    if len(windows) > 1:
        raise SettingsInvalid(
            [f"objectives have the windows {', '.join(sorted(windows))}; Sloth has one for all"]
        )
    slos = [
        {
            "name": _name_of(objective),
            "objective": _percent(objective),
            "description": _description(objective),
            "sli": {
                "events": {
                    "error_query": _of_window(objective, eq("verdict", Verdict.MISSED)),
                    "total_query": _of_window(objective, _JUDGED),
                }
            },
            "alerting": {
                "name": "LlmSloBudgetBurn",
                "page_alert": {"labels": {"severity": "critical"}},
                "ticket_alert": {"labels": {"severity": "warning"}},
            },
        }
        for objective in objectives
    ]
    return [{"version": "prometheus/v1", "service": service, "slos": slos}]


def _of_window(objective: ObjectiveSettings, verdict: Matcher) -> str:
    return f"sum(rate({_counter(objective, verdict)}[{{{{.window}}}}]))"


def _percent(objective: ObjectiveSettings) -> float:
    return float(Decimal(str(objective.target)) * 100)


def pyrra(objectives: Sequence[ObjectiveSettings], service: str) -> list[Document]:
    """A ServiceLevelObjective of Pyrra for each objective. Raises SettingsInvalid."""
    return [
        {
            "apiVersion": "pyrra.dev/v1alpha1",
            "kind": "ServiceLevelObjective",
            "metadata": {
                "name": _name_of(objective),
                "labels": {"pyrra.dev/service": service},
            },
            "spec": {
                "target": number(_percent(objective)),
                "window": _shorthand(objective),
                "description": _description(objective),
                "indicator": {
                    "ratio": {
                        "errors": {"metric": _counter(objective, eq("verdict", Verdict.MISSED))},
                        "total": {"metric": _counter(objective, _JUDGED)},
                        "grouping": ["model"],
                    }
                },
            },
        }
        for objective in _named_once(objectives)
    ]


FORMATS = {"openslo": openslo, "sloth": sloth, "pyrra": pyrra}


def objectives_in(texts: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Objectives of the settings, by OpenSLO documents, and a remark on what is left out.

    Raises SettingsInvalid with a sentence for each SLO that says what the agent cannot.
    """
    documents = [each for text in texts for each in _documents(text)]
    indicators = {
        str(_metadata(each).get("name")): each.get("spec") or {}
        for each in documents
        if each.get("kind") == "SLI"
    }
    found, problems = [], []
    for document in documents:
        try:
            found += _objectives(document, indicators)
        except _Unsayable as problem:
            problems.append(f"{_title(document)}: {problem}")
    if not found and not problems:
        problems.append(f"there is no SLO of {VERSION}")
    if problems:
        raise SettingsInvalid(problems)
    alerts = [_title(each) for each in documents if each.get("kind") in _ALERTS]
    return found, [f"{each} is left out: `goodput-agent render` makes alerts" for each in alerts]


def _title(document: Document) -> str:
    return f"{document.get('kind')} {_metadata(document).get('name')!r}"


def _objectives(document: Document, indicators: Mapping[str, Document]) -> list[dict[str, Any]]:
    """The objective of a document, if it is an SLO."""
    if document.get("apiVersion") != VERSION:
        raise _Unsayable(f"apiVersion is {document.get('apiVersion')!r}, not {VERSION}")
    if document.get("kind") in _IGNORED:
        return []
    if document.get("kind") != "SLO":
        raise _Unsayable("it is no kind of OpenSLO")
    try:
        return [_objective(document, indicators)]
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        # A text in place of a mapping, and the like.
        raise _Unsayable(f"it is not built as an SLO of {VERSION} ({error})") from error


class _Unsayable(Exception):
    """An SLO says what no objective of the settings can."""


def _documents(text: str) -> Iterator[dict[str, Any]]:
    try:
        for document in yaml.safe_load_all(text):
            if isinstance(document, dict):
                yield document
            elif document is not None:
                raise SettingsInvalid(["a document is not a mapping, as those of OpenSLO are"])
    except yaml.YAMLError as error:
        raise SettingsInvalid([f"the file is no YAML: {error}"]) from error


def _metadata(document: Document) -> Mapping[str, Any]:
    found = document.get("metadata")
    return found if isinstance(found, Mapping) else {}


def _objective(document: Document, indicators: Mapping[str, Document]) -> dict[str, Any]:
    spec = document.get("spec") or {}
    if spec.get("budgetingMethod") != "Occurrences":
        raise _Unsayable(
            f"budgetingMethod is {spec.get('budgetingMethod')!r}, and the agent counts requests, "
            "which is Occurrences"
        )
    goals = spec.get("objectives") or []
    if len(goals) != 1 or {"indicator", "indicatorRef"} & goals[0].keys():
        raise _Unsayable("it has several objectives or a composite one; write an SLO for each")
    settings: dict[str, Any] = {"name": _metadata(document).get("name")}
    settings |= dict(_limits(document, goals[0], indicators))
    settings |= {"target": _target(goals[0]), "window": _window(spec)}
    try:
        ObjectiveSettings(**settings)
    except ValidationError as error:
        places = (
            f"{'.'.join(map(str, each['loc'])) or 'objective'}: {each['msg']}"
            for each in error.errors()
        )
        raise _Unsayable("; ".join(places)) from error
    return settings


def _target(goal: Document) -> float:
    percent, share = goal.get("targetPercent"), goal.get("target")
    if (percent is None) == (share is None):
        raise _Unsayable("its objective needs either target or targetPercent")
    return float(Decimal(str(percent)) / 100 if share is None else share)


def _window(spec: Document) -> str:
    windows = spec.get("timeWindow") or []
    if len(windows) != 1 or not windows[0].get("isRolling") or windows[0].get("calendar"):
        raise _Unsayable("timeWindow is not one rolling window; the agent has no calendar")
    duration = str(windows[0].get("duration"))
    found = re.fullmatch(r"(\d+)([mhdw])", duration)
    if found is None:
        raise _Unsayable(f"the window {duration!r} has none of the units m, h, d and w")
    weeks = found[2] == "w"
    return f"{7 * int(found[1])}d" if weeks else duration


def _limits(
    document: Document, goal: Document, indicators: Mapping[str, Document]
) -> Iterator[tuple[str, Any]]:
    annotations = _metadata(document).get("annotations") or {}
    own = {
        key.removeprefix(PREFIX): value
        for key, value in annotations.items()
        if key.startswith(PREFIX)
    }
    inner: dict[str, dict[str, Any]] = {}
    for key, text in own.items():
        section, _, below = key.partition(".")
        value = text if key in _TEXTS else _plain(text)
        if below:
            inner.setdefault(section, {})[below] = value
        else:
            yield key, value
    yield from inner.items()
    if not own:
        yield _by_query(document.get("spec") or {}, goal, indicators)


def _plain(text: Any) -> Any:
    """A number or a boolean of an annotation, else its text."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def _by_query(
    spec: Document, goal: Document, indicators: Mapping[str, Document]
) -> tuple[str, float]:
    inline = (spec.get("indicator") or {}).get("spec")
    indicator = inline or indicators.get(str(spec.get("indicatorRef"))) or {}
    query = json.dumps(indicator.get("thresholdMetric") or "")
    names = {field for series, field in _LATENCIES.items() if series in query}
    if len(names) != 1 or goal.get("op") not in ("lte", "lt") or not goal.get("value"):
        raise _Unsayable(
            f"no limit on a request can be read from it; add an annotation such as "
            f"{PREFIX}ttft_ms, or use a thresholdMetric on a latency in seconds, with op lte"
        )
    return names.pop(), float(Decimal(str(goal["value"])) * 1000)
