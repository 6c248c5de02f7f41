"""Reference pages of metrics, settings, alerts and tables, made from their declarations."""

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from textwrap import dedent
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sqlalchemy import Column, DateTime, LargeBinary, String, Table, Text, TypeDecorator

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.engines import DIALECTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import AGENT_METRICS
from agent.catalog.routers import ROUTER_FACTS, ROUTERS
from agent.records.objective import Objective
from agent.render.alerts.alert_files import RULES, VLLM_ALONE, all_alerts
from agent.render.alerts.alert_rule import Alert, RuleOptions, Timings
from agent.render.alerts.objective_alerts import ALLOWED
from agent.render.alerts.thresholds import THRESHOLDS, used_in
from agent.render.alerts.vllm_alerts import vllm_alerts
from agent.settings import Settings
from agent.settings.loading import PREFIX
from agent.settings.values import Section

_MADE = "Made by `goodput-agent render` from the code. Change it there, and render again."


def page(title: str, remark: str, parts: Iterable[str]) -> str:
    """A page: its title, what it is, and its parts."""
    return "\n\n".join((f"# {title}", remark, _MADE, *parts)) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell may hold any character but a line break."""
    rule = ["---"] * len(header)
    return "\n".join(_table_line(cells) for cells in (header, rule, *rows))


def code(text: str) -> str:
    """Text as code in a line."""
    # A back quote inside needs more of them outside.
    return f"`{text}`" if "`" not in text else f"`` {text} ``"


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


@cache
def field_meanings(declared: type) -> Mapping[str, str]:
    """The meaning of each field that has one, by its name, in one line."""
    (tree,) = ast.parse(dedent(inspect.getsource(declared))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
    found = ((_field(above), _text(below)) for above, below in pairwise(tree.body))
    return {name: text for name, text in found if name is not None and text is not None}


def summary_of(declared: type) -> str:
    """The first sentence of a class's docstring."""
    return inspect.cleandoc(declared.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _field(node: ast.stmt) -> str | None:
    """The name of the field that a statement declares."""
    declares = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    return node.target.id if declares else None  # type: ignore[attr-defined]


def _text(node: ast.stmt) -> str | None:
    """The text of a statement that is only a string."""
    constant = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(constant, ast.Constant) or not isinstance(constant.value, str):
        return None
    return " ".join(constant.value.split())


_ENDINGS = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: ""}
_METRIC_HEADER = ("metric", "type", "unit", "labels", "meaning", "absent")


@dataclass(frozen=True, slots=True)
class _Group:
    """Metrics of one kind. `labels` come before each metric's own."""

    title: str
    remark: str
    metrics: Sequence[Metric]
    labels: tuple[str, ...]
    absent: Callable[[Metric], str]


def _own(metric: Metric) -> str:
    return metric.absent or "never"


def _of_engine(fact: Metric) -> str:
    engines = [name for name, dialect in DIALECTS.items() if fact in dialect.facts]
    given = "" if set(engines) == set(DIALECTS) else f"on engines other than {', '.join(engines)}"
    return fact.absent or given


def _of_gpu(fact: Metric) -> str:
    return fact.absent or "if the GPU does not report it"


def _of_router(fact: Metric) -> str:
    routers = [router.engine for router in ROUTERS if fact in router.facts]
    others = "" if len(routers) == len(ROUTERS) else f"on routers other than {', '.join(routers)}"
    return fact.absent or others or "while the router cannot be read"


_GROUPS = (
    _Group(
        "Requests, objectives and the agent",
        "Counters of known labels are 0 from the start.",
        AGENT_METRICS,
        (),
        _own,
    ),
    _Group(
        "Efficiency and cost",
        "Of the newest stored minute of an engine, so absent until its first minute is stored, "
        "about two minutes after the start.",
        EFFICIENCY_METRICS,
        (),
        _own,
    ),
    _Group(
        "Engines",
        "Every engine's own metrics under one name. All are absent while the engine does not "
        "answer (`llm_engine_up` is 0), and each if the exposition of the engine lacks it.",
        ENGINE_FACTS,
        ("engine", "model"),
        _of_engine,
    ),
    _Group(
        "Machines of engines",
        "Read by the agent on its own machine.",
        HOST_FACTS,
        (),
        _own,
    ),
    _Group(
        "GPUs",
        "The label `gpu` is the UUID. Of a GPU that cannot be read only `gpu_up` and the counts of "
        "Xids are left.",
        GPU_FACTS,
        ("gpu",),
        _of_gpu,
    ),
    _Group(
        "Routers",
        "Of the routers in the settings (docs/routers.md). Of one that cannot be read only "
        "`llm_router_up` is left.",
        ROUTER_FACTS,
        ("router",),
        _of_router,
    ),
)


def metrics_page() -> str:
    """The page in Markdown."""
    return page(
        "Metrics",
        "Every metric on `/metrics`. A histogram has the series `_bucket`, `_sum` and `_count`. "
        "Prometheus adds `job` and `instance`; `instance` distinguishes agents.",
        _metric_parts(),
    )


def _metric_parts() -> Iterator[str]:
    for group in _GROUPS:
        yield f"## {group.title}"
        yield group.remark
        yield table(_METRIC_HEADER, (_metric_row(metric, group) for metric in group.metrics))


def _metric_row(metric: Metric, group: _Group) -> tuple[str, ...]:
    labels = (*group.labels, *metric.labels)
    return (
        code(metric.name + _ENDINGS[metric.kind]),
        metric.kind.value,
        metric.unit.value,
        ", ".join(code(label) for label in labels),
        metric.help,
        group.absent(metric),
    )


_SETTING_HEADER = ("setting", "default", "environment", "meaning")
_REQUIRED = "required"
_COMPUTED = "at start"


class Setting(NamedTuple):
    """One setting: its path in the file, its default in YAML, its variable and its meaning.

    `default` is None if there is none, or if it is known at the start only.
    """

    path: str
    variable: str
    default: str | None
    required: bool
    meaning: str


class _SettingPath(NamedTuple):
    """The key of a section, in the file and in a variable."""

    path: str = ""
    variable: str = PREFIX

    def of(self, key: str) -> "_SettingPath":
        before = f"{self.variable}__" if self.path else self.variable
        path = f"{self.path}.{key}" if self.path else key
        return _SettingPath(path, f"{before}{key.upper()}")

    def item(self) -> "_SettingPath":
        return _SettingPath(f"{self.path}[0]", f"{self.variable}__0")


def settings_page() -> str:
    """The page in Markdown."""
    return page(
        "Settings",
        "Every key of the file that `--config` names, and its environment variable, which wins. "
        "A list is set by number: `GOODPUT_ENGINES__1__URL` is of the second engine. Unknown keys "
        "are errors. Durations are written as in `5s`, `10m`, `12h`, `30d`.",
        _setting_parts(),
    )


def all_settings() -> Iterator[Setting]:
    """Every setting, in the order of the declarations."""
    for _, settings in _sections(Settings, _SettingPath()):
        yield from settings


def _setting_parts() -> Iterator[str]:
    for title, settings in _sections(Settings, _SettingPath()):
        # A section may hold only others.
        if settings:
            yield f"## {title}"
            yield table(_SETTING_HEADER, map(_setting_row, settings))


def _setting_row(setting: Setting) -> tuple[str, ...]:
    default = _REQUIRED if setting.required else _COMPUTED
    if setting.default is not None:
        default = code(setting.default)
    return code(setting.path), default, code(setting.variable), setting.meaning


def _sections(section: type[BaseModel], at: _SettingPath) -> Iterator[tuple[str, list[Setting]]]:
    """The titles and settings of a section, and then of the sections inside it."""
    meanings = field_meanings(section)
    own, inner = [], []
    for name, field in section.model_fields.items():
        here = at.of(field.alias or name)
        found, is_list = _inner(field.annotation)
        if found is None or name in meanings:
            own.append(_setting(here, field, meanings[name]))
        if found is not None:
            inner.append((found, here.item() if is_list else here))
    title = code(at.path) if at.path else "The agent"
    yield f"{title}: {_lower(summary_of(section))}", own
    for found, where in inner:
        yield from _sections(found, where)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section of a setting's type, and whether it is a list of them."""
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if get_origin(option) is tuple:
            found, _ = _inner(get_args(option)[0])
            return found, True
        if isinstance(option, type) and issubclass(option, Section):
            return option, False
    return None, False


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _setting(at: _SettingPath, field: FieldInfo, meaning: str) -> Setting:
    default = None
    if not field.is_required() and field.default_factory is None:
        default = _yaml(field.default)
    words = _words(field.annotation)
    allowed = f" One of {', '.join(map(code, words))}." if words else ""
    return Setting(at.path, at.variable, default, field.is_required(), meaning + allowed)


def _words(annotation: Any) -> tuple[str, ...]:
    """The words that a setting may be, if those are all."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _yaml(value: Any) -> str:
    """A default as it would be written in the file."""
    if isinstance(value, tuple):
        value = [_plain(item) for item in value]
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=1000)
    return text.removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, include=value.model_fields_set)
    return value


_TABLE_HEADER = ("column", "type", "unit", "meaning")

# The meaning of a table itself is under this name.
TABLE = ""

# The unit of a column by the end of its name; the first that fits.
_UNITS = (
    (r"_bytes_per_s", "bytes/s"),
    (r"_flops_per_s", "FLOP/s"),
    (r"_s", "seconds"),
    (r"_usd", "US dollars"),
    (r"_bytes", "bytes"),
    (r"_flops", "FLOPs"),
    (r"_tokens", "tokens"),
    (r"_tokens_by_objective", "tokens"),
    (r"_m[fb]u", "ratio"),
    (r"_hours", "hours"),
    (r"joules", "joules"),
    (r"starts_at", "Unix seconds"),
)


def tables_page(tables: Iterable[Table], meanings: Mapping[str, Mapping[str, str]]) -> str:
    """The page in Markdown; `meanings` are those of columns by table, that of the table first."""
    return page(
        "Tables",
        "Every table and column of the database. Times are in UTC. A column marked `?` may be "
        "null: the value is unknown. PostgreSQL has the types of the same meaning.",
        _table_parts(tables, meanings),
    )


def _table_parts(
    tables: Iterable[Table], meanings: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    for each in tables:
        own = meanings[each.name]
        yield f"## {code(each.name)}"
        yield own[TABLE]
        yield table(_TABLE_HEADER, (_table_row(column, own) for column in each.columns))


def _table_row(column: Column[Any], own: Mapping[str, str]) -> tuple[str, ...]:
    return code(column.name), _type(column), unit_of(column), meaning_of(column, own)


def meaning_of(column: Column[Any], own: Mapping[str, str]) -> str:
    """The meaning of a column; one that holds a field of a record has the field's."""
    field = column.info.get("field")
    if column.name in own or field is None:
        return own[column.name]
    return field_meanings(field.record)[field.name]


def unit_of(column: Column[Any]) -> str:
    """The unit of a column's numbers; empty for counts, texts and timestamps."""
    if isinstance(column.type, (String, TypeDecorator)) and not column.name.endswith("objective"):
        return ""
    return next((unit for end, unit in _UNITS if re.search(f"{end}$", column.name)), "")


def _type(column: Column[Any]) -> str:
    kind = column.type
    if isinstance(kind, (TypeDecorator, DateTime)):
        text = "timestamp"
    elif isinstance(kind, LargeBinary):
        text = "bytes"
    elif isinstance(kind, Text):
        text = "text"
    elif isinstance(kind, String):
        text = f"text({kind.length})"
    else:
        text = str(kind).lower()
    return f"{text}?" if column.nullable else text


_USUAL = RuleOptions()
_ALERT_HEADER = ("alert", "severity", "holds for", "threshold", "meaning")

# A comparison with a number, or with a number times something. `(... > 0)` only keeps a quotient
# from division by zero.
_THRESHOLD = re.compile(
    r"(?<=\s)((?:==|!=|>=|<=|>|<) \d+(?:\.\d+)?(?: \*)?)(?![\d.])(?!(?<=> 0)\))"
)
# A comparison with what the target allows; its last number only leaves out unreachable ones.
_RELATIVE = re.compile(
    rf"> on \(objective\) group_left \(\) \((?:([\d.]+) \* {ALLOWED} < [\d.]+"
    rf"|\(1 \+ \({ALLOWED} >= [\d.]+\)\) / 2)\)"
)
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_ABSENT = re.compile(r"^absent\(", re.MULTILINE)


def alerts_page(
    files: Mapping[str, Mapping[str, Sequence[Alert]]], timings: Timings, runbooks: str
) -> str:
    """The page in Markdown. `files` are the alerts by file and group; `runbooks` is their folder.

    The limits of an objective have alerts of their own.
    """
    return page(
        "Alerts",
        "Every alert with the thresholds in its expression. `critical`: somebody must act now; "
        "`warning`: in working hours; `info`: it only mutes others, or is the watchdog. An alert "
        "fires when its expression has been true for as long "
        "as it holds. Alerts on error budgets are on every objective that an agent has. Those on "
        "limits are here of the preset `chat`; `goodput-agent render` makes those of your "
        "objectives.",
        (*_alert_parts(files, timings, runbooks), *_threshold_parts(files)),
    )


def _alert_parts(
    files: Mapping[str, Mapping[str, Sequence[Alert]]], timings: Timings, runbooks: str
) -> Iterator[str]:
    for file, groups in files.items():
        yield f"## {code(file)}"
        for group, alerts in groups.items():
            yield f"### {group}"
            yield table(_ALERT_HEADER, (_alert_row(alert, timings, runbooks) for alert in alerts))
            for alert in alerts:
                yield f"{_title(alert)}:"
                yield f"```promql\n{_USUAL.expression(alert.expression)}\n```"


def _threshold_parts(files: Mapping[str, Mapping[str, Sequence[Alert]]]) -> Iterator[str]:
    using: dict[str, dict[str, None]] = {name: {} for name in THRESHOLDS}
    for groups in files.values():
        for alert in (alert for alerts in groups.values() for alert in alerts):
            for name in used_in(alert.expression):
                using[name][alert.name] = None
    yield "## Thresholds"
    yield (
        "`goodput-agent render --threshold NAME=VALUE` sets one, and `alerts.thresholds` of the "
        "Helm chart. The limits and the target of an objective are in the settings."
    )
    yield table(
        ("threshold", "default", "unit", "alerts", "meaning"),
        (
            (code(name), f"{each.default:f}", each.unit, ", ".join(using[name]), each.reason)
            for name, each in THRESHOLDS.items()
        ),
    )


def _alert_row(alert: Alert, timings: Timings, runbooks: str) -> tuple[str, ...]:
    return (
        f"[{_title(alert)}]({runbooks}/{alert.name}.md)",
        alert.severity.value,
        timings.hold(alert.hold_s) if alert.hold_s else "",
        ", ".join(map(code, thresholds(_USUAL.expression(alert.expression)))),
        _LABEL.sub(r"*\1*", alert.summary) + ".",
    )


def _title(alert: Alert) -> str:
    """The alert's name; if several have it, with its tier."""
    tier = alert.labels.get("tier")
    return alert.name if tier is None else f"{alert.name} tier {tier}"


def thresholds(expression: str) -> list[str]:
    """The comparisons with numbers of an expression, each once, in their order."""
    found = [
        f"> {factor} * allowed" if factor else "> (1 + allowed) / 2"
        for factor in _RELATIVE.findall(expression)
    ]
    rest = _RELATIVE.sub("", expression)
    found += [text.replace("*", "* ...") for text in _THRESHOLD.findall(rest)]
    absent = _ABSENT.search(expression) or (not found and "unless" in expression)
    return list(dict.fromkeys(["no series"] * bool(absent) + found))


FOLDER = "docs/reference"
_RUNBOOKS = "../runbooks"


@dataclass(frozen=True, slots=True)
class Declared:
    """Tables of the database, and the meanings of their columns by table."""

    tables: Iterable[Table]
    meanings: Mapping[str, Mapping[str, str]]


def render_reference(
    declared: Declared,
    objectives: Sequence[Objective],
    timings: Timings,
    budget_usd: float | None = None,
) -> Mapping[str, str]:
    """The texts of all pages by path."""
    # A preset has no alerts on its limits, and readers look for them here.
    promised = [replace(objective, is_preset=False) for objective in objectives]
    alerts = {
        RULES: all_alerts(promised, timings, budget_usd),
        VLLM_ALONE: {"vllm-alone": list(vllm_alerts(promised, timings))},
    }
    return {
        f"{FOLDER}/metrics.md": metrics_page(),
        f"{FOLDER}/settings.md": settings_page(),
        f"{FOLDER}/alerts.md": alerts_page(alerts, timings, _RUNBOOKS),
        f"{FOLDER}/tables.md": tables_page(declared.tables, declared.meanings),
    }
