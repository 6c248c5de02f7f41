"""The page of alerts: threshold, severity, hold time, runbook and expression of each."""

import re
from collections.abc import Iterator, Mapping, Sequence

from agent.render.alerts.alert_rule import Alert
from agent.render.alerts.timings import Timings
from agent.render.reference.markdown_page import code, page, table

_HEADER = ("alert", "severity", "holds for", "threshold", "meaning")

# A comparison with a number, or with a number times something. `(... > 0)` only keeps a quotient
# from division by zero.
_THRESHOLD = re.compile(
    r"(?<=\s)((?:==|!=|>=|<=|>|<) \d+(?:\.\d+)?(?: \*)?)(?![\d.])(?!(?<=> 0)\))"
)
_LABEL = re.compile(r"\{\{ \$labels\.(\w+) \}\}")
_ABSENT = re.compile(r"^absent\(", re.MULTILINE)


def alerts_page(
    files: Mapping[str, Mapping[str, Sequence[Alert]]], timings: Timings, runbooks: str
) -> str:
    """The page in Markdown. `files` are the alerts by file and group; `runbooks` is their folder.

    An objective has alerts of its own: those of the first one stand for all.
    """
    return page(
        "Alerts",
        "Every alert with the thresholds in its expression. `page`: somebody must act now; "
        "`ticket`: in working hours. An alert fires when its expression has been true for as long "
        "as it holds. The rules here are those of the default objective; `goodput-agent render` "
        "makes those of yours.",
        _parts(files, timings, runbooks),
    )


def _parts(
    files: Mapping[str, Mapping[str, Sequence[Alert]]], timings: Timings, runbooks: str
) -> Iterator[str]:
    for file, groups in files.items():
        yield f"## {code(file)}"
        for group, alerts in groups.items():
            yield f"### {group}"
            yield table(_HEADER, (_row(alert, timings, runbooks) for alert in alerts))
            for alert in alerts:
                yield f"{_title(alert)}:"
                yield f"```promql\n{alert.expression}\n```"


def _row(alert: Alert, timings: Timings, runbooks: str) -> tuple[str, ...]:
    return (
        f"[{_title(alert)}]({runbooks}/{alert.name}.md)",
        alert.severity.value,
        timings.hold(alert.hold_s) if alert.hold_s else "",
        ", ".join(map(code, thresholds(alert.expression))),
        _LABEL.sub(r"*\1*", alert.summary) + ".",
    )


def _title(alert: Alert) -> str:
    """The alert's name; where several have it, with its tier."""
    tier = alert.labels.get("tier")
    return alert.name if tier is None else f"{alert.name} tier {tier}"


def thresholds(expression: str) -> list[str]:
    """The comparisons with numbers of an expression, each once, in their order."""
    found = [text.replace("*", "* ...") for text in _THRESHOLD.findall(expression)]
    return list(dict.fromkeys(["no series"] * bool(_ABSENT.search(expression)) + found))
