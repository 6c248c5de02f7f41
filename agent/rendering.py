"""The `render` command: rules and dashboards made from the settings, written into a folder."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from agent.analysis.burn_rates import Burn, OutageRule, plan
from agent.errors import SettingsInvalid
from agent.records.objective import Objective
from agent.render.alerts import (
    DEFAULT_SECRETS,
    PLACEHOLDERS,
    Links,
    Receivers,
    Timings,
    render_alerts,
    shortcomings,
)
from agent.render.alerts.alert_files import VLLM_ALONE
from agent.render.alerts.number_text import percent
from agent.render.alerts.objective_alerts import HOLD_S
from agent.render.dashboards import render_dashboards
from agent.render.kubernetes import PROMETHEUS_RULE, render_kubernetes
from agent.settings import Settings, load
from agent.settings.environment import RENDER_PREFIX
from agent.settings.values import HttpUrl, duration_text

# Shares of requests that miss, as the detection times are shown for.
MISSED_RATIOS = (1.0, 0.5, 0.25)
# Which files are in need of an address that nobody but the operator knows.
_PLACES = {"dashboards": PROMETHEUS_RULE, "runbooks": f"{PROMETHEUS_RULE} and {VLLM_ALONE}"}


def _url(text: str) -> str:
    try:
        TypeAdapter(HttpUrl).validate_python(text)
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is no URL; write https://host/path") from error
    return text


def _named(option: str, meaning: str, **more: Any) -> Any:
    """An option that an environment variable may give as well."""
    variable = RENDER_PREFIX + option.upper().replace("-", "_")
    return typer.Option(f"--{option}", envvar=variable, help=meaning, **more)


def _named_url(option: str, meaning: str) -> Any:
    return _named(option, meaning, parser=_url, metavar="URL")


ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with the settings.", dir_okay=False)
]
Folder = Annotated[
    Path,
    typer.Option(
        "--into", help="Where alerts/, dashboards/ and deploy/ are written.", file_okay=False
    ),
]
Dashboards = Annotated[str | None, _named_url("dashboards", "Where alerts link to Grafana.")]
Runbooks = Annotated[
    str | None, _named_url("runbooks", "Where alerts link to runbooks: http://AGENT/runbooks.")
]
Pagerduty = Annotated[
    bool, _named("pagerduty", "Tell PagerDuty of pages; its key is the file pagerduty_routing_key.")
]
SlackPages = Annotated[
    str | None,
    _named("slack-pages", "Slack channel for pages; the URL of Slack is the file slack_api_url."),
]
SlackTickets = Annotated[
    str | None,
    _named("slack-tickets", "Slack channel for tickets; the URL of Slack is the same file."),
]
Webhook = Annotated[str | None, _named_url("webhook", "Who takes all alerts as JSON.")]
WebhookToken = Annotated[
    bool, _named("webhook-token", "Send the webhook the bearer token in the file webhook_token.")
]
Deadman = Annotated[
    str | None, _named_url("deadman", "Who raises the alarm when the watchdog stays away.")
]
Secrets = Annotated[str, _named("secrets", "Folder of these files, where Alertmanager runs.")]
Speed = Annotated[float, typer.Option(min=1.0, help="Times faster than meant, for a trial.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--token-budget",
        min=0,
        help="Dollars that a million output tokens may cost, all included; without it, "
        "token_budget of the settings.",
    ),
]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two scrapes.")]


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
    speed: Speed = 1.0,
    scrape_interval: Interval = 15.0,
    token_budget: Budget = None,
) -> None:
    """Write alert rules and dashboards for the objectives, and say how soon the rules tell."""
    _refuse_unknown(context)
    settings = load(config, os.environ)
    receivers = Receivers(
        pagerduty=pagerduty,
        slack_pages=slack_pages,
        slack_tickets=slack_tickets,
        webhook=webhook,
        webhook_token=webhook_token,
        deadman=deadman,
        secrets=secrets,
    )
    wanted = Wanted(
        settings=settings,
        timings=Timings(speed, scrape_interval, 2 * scrape_interval),
        links=_told(dashboards=dashboards, runbooks=runbooks),
        budget_usd=settings.token_budget_usd if token_budget is None else token_budget,
        receivers=receivers,
    )
    _tell(write(into, texts(wanted)), wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be rendered. `links` are those that the operator told, by their names."""

    settings: Settings
    timings: Timings
    links: Mapping[str, str]
    budget_usd: float | None
    receivers: Receivers


def _told(**links: str | None) -> Mapping[str, str]:
    return {name: url for name, url in links.items() if url is not None}


def _refuse_unknown(context: typer.Context) -> None:
    """SettingsInvalid where a variable speaks of an option that `render` does not have."""
    known = {str(parameter.envvar) for parameter in context.command.params if parameter.envvar}
    given = {name for name in os.environ if name.startswith(RENDER_PREFIX)}
    if given - known:
        listed = ", ".join(sorted(known))
        raise SettingsInvalid(
            [
                f"{name}: is no option of render; known are {listed}"
                for name in sorted(given - known)
            ]
        )


def _tell(written: Sequence[Path], wanted: Wanted) -> None:
    console = Console()
    for path in written:
        console.print(f"wrote {path}", highlight=False)
    console.print(detection_table(wanted.settings.promised(), wanted.timings))
    for sentence in remarks(wanted):
        console.print(sentence, highlight=False)


def texts(wanted: Wanted) -> Mapping[str, str]:
    """All files by their paths."""
    objectives = wanted.settings.promised()
    links = replace(Links(), **wanted.links)
    elsewhere = replace(PLACEHOLDERS, **wanted.links)

    def alerts(links: Links) -> Mapping[str, str]:
        return render_alerts(
            objectives,
            wanted.timings,
            links,
            elsewhere=elsewhere,
            budget_usd=wanted.budget_usd,
            receivers=wanted.receivers,
        )

    # Nobody reads a cluster's alerts on the machine where its agent is.
    kubernetes = render_kubernetes(alerts(elsewhere))
    return {**alerts(links), **kubernetes, **render_dashboards(objectives)}


def remarks(wanted: Wanted) -> Iterator[str]:
    """A sentence on everything that the files lack, and on how to change that."""
    for row in shortcomings(wanted.settings.promised()):
        yield f"Objective {row.objective}, {row.rule}: {row.reason}."
    if wanted.budget_usd is not None and not wanted.settings.price_list().prices:
        yield (
            "LlmTokenCostOverBudget can never fire: no GPU has a price. Set prices, or "
            "gpu_hour_usd of an engine."
        )
    for name, files in _PLACES.items():
        if name not in wanted.links:
            yield f"Links to {name} in {files} lead nowhere yet: tell their address with --{name}."
    yield from wanted.receivers.silences()


def write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write texts by their paths below a folder; the paths that were written."""
    written = []
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def detection_table(objectives: Sequence[Objective], timings: Timings) -> Table:
    """How long each rule on an error budget takes to fire, by the share of requests that miss."""
    table = Table(title="Time until an alert on the error budget", title_justify="left")
    for column in ("objective", "rule", "fires above"):
        table.add_column(column)
    for ratio in MISSED_RATIOS:
        table.add_column(f"{percent(ratio)} miss", justify="right")
    for objective in objectives:
        for cells in detection_rows(objective, timings):
            table.add_row(*cells)
    return table


def detection_rows(objective: Objective, timings: Timings) -> Iterator[tuple[str, ...]]:
    """The rows on one objective: name, rule, threshold, and the times as texts."""
    found = plan(objective.target, objective.window_s)
    named: list[tuple[str, Burn | OutageRule]] = []
    if found.outage:
        named.append(("outage, page", found.outage))
    for burn in found.kept:
        kind = "page" if burn.tier.pages else "ticket"
        named.append((f"tier {burn.tier.number}, {kind}", burn))
    for name, rule in named:
        times = [_time(rule.detects_in_s(ratio), timings) for ratio in MISSED_RATIOS]
        yield objective.name, name, percent(rule.threshold), *times


def _time(detects_in_s: float | None, timings: Timings) -> str:
    """With the time that the condition must hold and, at worst, a scrape and an evaluation."""
    if detects_in_s is None:
        return "never"
    waits_s = timings.scrape_interval_s + 2 * timings.evaluation_interval_s
    total_s = timings.seconds(detects_in_s + HOLD_S) + waits_s
    return duration_text(float(round(total_s))) if total_s < 60 else _minutes(total_s)


def _minutes(seconds: float) -> str:
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{hours}h {rest:02}m" if hours else f"{minutes}m"
