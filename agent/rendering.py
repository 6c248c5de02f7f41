"""The `render` command: writes alert rules, dashboards and reference pages for the settings."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from agent.command_options import AsJson, ConfigFile, write_text
from agent.errors import SettingsInvalid
from agent.records.objective import Objective
from agent.render.alerts import (
    DEFAULT_SECRETS,
    PLACEHOLDERS,
    ChartOptions,
    Links,
    Receivers,
    RuleOptions,
    Severity,
    Timings,
    render_alerts,
    shortcomings,
)
from agent.render.alerts.alert_files import PROMETHEUS_RULE, VLLM_ALONE, render_kubernetes
from agent.render.alerts.alert_rule import percent
from agent.render.alerts.objective_alerts import MISSED_RATIOS, detections
from agent.render.alerts.thresholds import RATIO, THRESHOLDS
from agent.render.dashboards import render_dashboards
from agent.settings import Settings, load
from agent.settings.loading import RENDER_PREFIX
from agent.settings.values import HttpUrl, did_you_mean, duration_text
from agent.store.table_meanings import MEANINGS
from agent.terminal import TerminalConsole, echo

# The files with links whose address only the operator knows.
_PLACES = {"dashboards": PROMETHEUS_RULE, "runbooks": f"{PROMETHEUS_RULE} and {VLLM_ALONE}"}


_NO_OBJECTIVES = (
    "The settings have no objectives, so no alert is on a limit of the preset {name}. Alerts on "
    "error budgets are on every objective that an agent has."
)
_LARGEST = 1_000_000
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = ("alertname", "severity", "objective", "tier")
_LABELS_OF_SERIES = ("instance", "engine", "model", "model_name", "gpu", "le")
# A value that PromQL, a template of Prometheus and YAML hold as it is.
_PLAIN_VALUE = re.compile(r"[\w.:/@-]+", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


def _url(text: str) -> str:
    try:
        TypeAdapter(HttpUrl).validate_python(text)
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is not a URL; write https://host/path") from error
    return text


def _finite(number: float | None) -> float | None:
    if number is not None and number > _LARGEST:
        raise typer.BadParameter(f"the largest number is {_LARGEST:,}")
    return number


def _named(option: str, meaning: str, **more: Any) -> Any:
    """An option that an environment variable can set as well."""
    variable = RENDER_PREFIX + option.upper().replace("-", "_")
    # Too long for a column of the help, which names them all in a sentence.
    return typer.Option(f"--{option}", envvar=variable, show_envvar=False, help=meaning, **more)


def _pair(text: str) -> str:
    name, equals, value = text.partition("=")
    if not equals or not value or not _LABEL_NAME.fullmatch(name):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE, such as team=ml")
    return text


def _severities(pairs: Sequence[str]) -> Sequence[str]:
    given = _by_name(pairs)
    for unknown in given.keys() - set(Severity):
        raise typer.BadParameter(f"{unknown!r} is none of {', '.join(Severity)}")
    names = [given.get(each, each) for each in Severity]
    if len({*names}) < len(names):
        raise typer.BadParameter(f"{', '.join(names)}: two severities have one name")
    return pairs


def _labels(pairs: Sequence[str]) -> Sequence[str]:
    for pair in pairs:
        if (name := pair.split("=", 1)[0]) in _OWN_LABELS:
            raise typer.BadParameter(f"{name!r} is a label of the rules themselves")
    return pairs


def _matchers(pairs: Sequence[str]) -> Sequence[str]:
    for name, value in _by_name(pairs).items():
        if name in (*_OWN_LABELS, *_LABELS_OF_SERIES):
            raise typer.BadParameter(f"{name!r} is a label that the rules tell series apart by")
        if not _PLAIN_VALUE.fullmatch(value):
            raise typer.BadParameter(f"{value!r} may hold letters, digits and _ . : / @ - alone")
    return pairs


def _thresholds(pairs: Sequence[str]) -> Sequence[str]:
    for name, value in _by_name(pairs).items():
        if name not in THRESHOLDS:
            raise typer.BadParameter(f"no threshold is called {name!r}{_near(name)}")
        if not _NUMBER.fullmatch(value):
            raise typer.BadParameter(f"{name}={value} is not a number, such as 0.5 or 20")
        if THRESHOLDS[name].unit == RATIO and Decimal(value) > 1:
            raise typer.BadParameter(f"{name}={value} is a ratio; write 0.05 for 5 %")
    return pairs


def _near(name: str) -> str:
    return did_you_mean(name, THRESHOLDS) or "; docs/reference/alerts.md lists them"


def _named_url(option: str, meaning: str) -> Any:
    return _named(option, meaning, parser=_url, metavar="URL")


Folder = Annotated[
    Path,
    typer.Option(
        "--into", help="Where alerts/, dashboards/, deploy/ and docs/ are written.", file_okay=False
    ),
]
Dashboards = Annotated[str | None, _named_url("dashboards", "URL of Grafana for links in alerts.")]
Runbooks = Annotated[
    str | None,
    _named_url("runbooks", "URL of the runbooks for links in alerts: http://AGENT/runbooks."),
]
Pagerduty = Annotated[
    bool, _named("pagerduty", "Send pages to PagerDuty; its key is the file pagerduty_routing_key.")
]
SlackPages = Annotated[
    str | None,
    _named("slack-pages", "Slack channel for pages; the URL of Slack is the file slack_api_url."),
]
SlackTickets = Annotated[
    str | None,
    _named("slack-tickets", "Slack channel for tickets; the URL of Slack is the same file."),
]
Webhook = Annotated[str | None, _named_url("webhook", "URL that gets all alerts as JSON.")]
WebhookToken = Annotated[
    bool, _named("webhook-token", "Send the webhook the bearer token in the file webhook_token.")
]
Deadman = Annotated[
    str | None,
    _named_url("deadman", "URL of a service that alarms when the watchdog stops."),
]
Secrets = Annotated[str, _named("secrets", "Folder of these files on Alertmanager's machine.")]
Severities = Annotated[
    list[str] | None,
    _named(
        "severity",
        "What you call a severity: critical=page, and so for warning and info.",
        parser=_pair,
        callback=lambda pairs: _severities(pairs or ()),
        metavar="NAME=VALUE",
    ),
]
FurtherLabels = Annotated[
    list[str] | None,
    _named(
        "label",
        "A label of every alert, such as cluster=eu-1; may be repeated.",
        parser=_pair,
        callback=lambda pairs: _labels(pairs or ()),
        metavar="NAME=VALUE",
    ),
]
Matchers = Annotated[
    list[str] | None,
    _named(
        "matcher",
        "A label that all series of these rules have, such as cluster=eu-1, if one Prometheus has "
        "several clusters; may be repeated.",
        parser=_pair,
        callback=lambda pairs: _matchers(pairs or ()),
        metavar="NAME=VALUE",
    ),
]
ThresholdPairs = Annotated[
    list[str] | None,
    _named(
        "threshold",
        "Another threshold, such as queue_requests=30; may be repeated. docs/reference/alerts.md "
        "lists them.",
        parser=_pair,
        callback=lambda pairs: _thresholds(pairs or ()),
        metavar="NAME=VALUE",
    ),
]
Speed = Annotated[
    float,
    typer.Option(
        metavar="TIMES", min=1.0, callback=_finite, help="Divide all times by this, for a trial."
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        "--token-budget",
        min=0,
        callback=_finite,
        help="Budget for a million output tokens in dollars, idle time included; the default is "
        "token_budget of the settings.",
    ),
]
Interval = Annotated[
    float,
    typer.Option(min=0.1, callback=_finite, metavar="SECONDS", help="Seconds between two scrapes."),
]


def render(
    context: typer.Context,
    config: ConfigFile = None,
    *,
    into: Folder = Path(),
    dashboards: Dashboards = None,
    runbooks: Runbooks = None,
    pagerduty: Pagerduty = False,
    slack_pages: SlackPages = None,
    slack_tickets: SlackTickets = None,
    webhook: Webhook = None,
    webhook_token: WebhookToken = False,
    deadman: Deadman = None,
    secrets: Secrets = DEFAULT_SECRETS,
    severities: Severities = None,
    labels: FurtherLabels = None,
    matchers: Matchers = None,
    thresholds: ThresholdPairs = None,
    speed: Speed = 1.0,
    scrape_interval: Interval = 15.0,
    token_budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """Write alert rules, dashboards and reference pages; print the detection time of each rule."""
    _refuse_unknown(context)
    settings = load(config, os.environ)
    job = RenderJob(
        settings=settings,
        timings=Timings(speed, scrape_interval, 2 * scrape_interval),
        links=_given(dashboards=dashboards, runbooks=runbooks),
        budget_usd=settings.token_budget_usd if token_budget is None else token_budget,
        receivers=Receivers(**{each.name: context.params[each.name] for each in fields(Receivers)}),
        options=RuleOptions(
            severities=_severity_names(severities or ()),
            further=_by_name(labels or ()),
            matchers=_by_name(matchers or ()),
            thresholds={each: Decimal(text) for each, text in _by_name(thresholds or ()).items()},
        ),
    )
    _report(write(into, texts(job)), job, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderJob:
    """The input of one rendering. `links` are the URLs of the options, by name."""

    settings: Settings
    timings: Timings
    links: Mapping[str, str]
    budget_usd: float | None
    receivers: Receivers
    options: RuleOptions


def _severity_names(pairs: Sequence[str]) -> Mapping[Severity, str]:
    given = _by_name(pairs)
    return {each: given.get(each, each.value) for each in Severity}


def _by_name(pairs: Sequence[str]) -> dict[str, str]:
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def _given(**links: str | None) -> Mapping[str, str]:
    return {name: url for name, url in links.items() if url is not None}


def _refuse_unknown(context: typer.Context) -> None:
    """Raise SettingsInvalid for a variable whose option `render` does not have."""
    known = {str(parameter.envvar) for parameter in context.command.params if parameter.envvar}
    given = {name for name in os.environ if name.startswith(RENDER_PREFIX)}
    if given - known:
        listed = ", ".join(sorted(known))
        raise SettingsInvalid(
            [
                f"{name}: render has no such option; it has {listed}"
                for name in sorted(given - known)
            ]
        )


def _report(written: Sequence[Path], job: RenderJob, *, as_json: bool) -> None:
    if as_json:
        echo(_json(written, job))
        return
    console = TerminalConsole()
    for path in written:
        console.print(f"wrote {path}")
    console.print(detection_table(job.settings.all_objectives(), job.timings))
    for sentence in remarks(job):
        console.print(sentence)


def _json(written: Sequence[Path], job: RenderJob) -> str:
    rules = [
        {
            "objective": each.objective,
            "rule": each.rule,
            "fires_above": float(each.threshold),
            "fires_after_s": dict(zip(map(str, MISSED_RATIOS), each.after_s, strict=True)),
        }
        for objective in job.settings.all_objectives()
        for each in detections(objective, job.timings)
    ]
    files = [str(path) for path in written]
    return json.dumps({"files": files, "rules": rules, "remarks": [*remarks(job)]}, indent=2)


def texts(job: RenderJob) -> Mapping[str, str]:
    """The texts of all files by path."""
    from agent.render.reference_pages import Declared, render_reference
    from agent.store.tables import metadata

    objectives = job.settings.all_objectives()
    links = replace(Links(), **job.links)
    elsewhere = replace(PLACEHOLDERS, **job.links)

    def alerts(links: Links, options: RuleOptions) -> Mapping[str, str]:
        return render_alerts(
            objectives,
            job.timings,
            links,
            elsewhere=elsewhere,
            budget_usd=job.budget_usd,
            receivers=job.receivers,
            options=options,
        )

    # The readers of a cluster's alerts are not on the machine of its agent.
    dashboards = render_dashboards(objectives)
    in_chart = ChartOptions(severities=job.options.severities, further=job.options.further)
    kubernetes = render_kubernetes(
        alerts(elsewhere, job.options), alerts(elsewhere, in_chart), dashboards
    )
    declared = Declared(metadata.tables.values(), MEANINGS)
    reference = render_reference(declared, objectives, job.timings, job.budget_usd)
    return {**alerts(links, job.options), **kubernetes, **dashboards, **reference}


def remarks(job: RenderJob) -> Iterator[str]:
    """A sentence for each rule, price, address and receiver that is missing."""
    for objective in job.settings.all_objectives():
        if objective.is_preset:
            yield _NO_OBJECTIVES.format(name=objective.name)
    for row in shortcomings(job.settings.all_objectives()):
        yield f"Objective {row.objective}, {row.rule}: {row.reason}."
    if job.budget_usd is not None and not job.settings.price_list().prices:
        yield (
            "LlmTokenCostOverBudget can never fire: no GPU has a price. Set prices, or "
            "gpu_hour_usd of an engine."
        )
    for name, files in _PLACES.items():
        if name not in job.links:
            yield f"Links to {name} in {files} lead nowhere yet: set their address with --{name}."
    yield from job.receivers.silences()


def write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write texts below a folder; returns the paths."""
    written = []
    for name, text in files.items():
        path = folder / name
        write_text("--into", path, text)
        written.append(path)
    return written


def detection_table(objectives: Sequence[Objective], timings: Timings) -> Table:
    """The time until each rule on an error budget fires, by the share of misses."""
    table = Table(title="Time until an alert on the error budget", title_justify="left")
    for column in ("objective", "rule", "fires above"):
        table.add_column(column)
    for ratio in MISSED_RATIOS:
        table.add_column(f"{percent(ratio)} miss", justify="right")
    for objective in objectives:
        for each in detections(objective, timings):
            times = map(_time_text, each.after_s)
            table.add_row(each.objective, each.rule, percent(each.threshold), *times)
    return table


def _time_text(total_s: float | None) -> str:
    if total_s is None:
        return "never"
    return duration_text(float(round(total_s))) if total_s < 60 else _minutes(total_s)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours}h {rest:02}m" if hours else f"{minutes}m"
