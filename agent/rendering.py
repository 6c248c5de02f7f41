"""The `render` command: rules and dashboards made from the settings, written into a folder."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agent.analysis.burn_rates import Burn, Outage, plan
from agent.records.objective import Objective
from agent.render.alerts import Links, Timings, render_alerts, shortcomings
from agent.render.alerts.objectives import HOLD_S
from agent.render.alerts.words import percent
from agent.render.dashboards import render_dashboards
from agent.render.kubernetes import render_kubernetes
from agent.settings import load
from agent.settings.values import duration_text

_DEFAULT = Links()
# Shares of requests that miss, as the detection times are shown for.
MISSED_RATIOS = (1.0, 0.5, 0.25)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with the settings.", dir_okay=False)
]
Folder = Annotated[
    Path,
    typer.Option(
        "--into", help="Where alerts/, dashboards/ and deploy/ are written.", file_okay=False
    ),
]
Dashboards = Annotated[str, typer.Option(help="Where Grafana is, for links in alerts.")]
Runbooks = Annotated[str, typer.Option(help="Where docs/runbooks is, for links in alerts.")]
Webhook = Annotated[str, typer.Option(help="Who takes alerts as JSON.")]
Deadman = Annotated[str, typer.Option(help="Who raises the alarm when the watchdog stays away.")]
Secrets = Annotated[str, typer.Option(help="Alertmanager's folder with keys and tokens.")]
Speed = Annotated[float, typer.Option(min=1.0, help="Times faster than meant, for a trial.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--token-budget", min=0, help="Dollars that a million output tokens may cost, all included."
    ),
]
Interval = Annotated[float, typer.Option(min=0.1, help="Seconds between two scrapes.")]


def render(
    config: ConfigFile = None,
    *,
    into: Folder = Path(),
    dashboards: Dashboards = _DEFAULT.dashboards,
    runbooks: Runbooks = _DEFAULT.runbooks,
    webhook: Webhook = _DEFAULT.webhook,
    deadman: Deadman = _DEFAULT.deadman,
    secrets: Secrets = _DEFAULT.secrets,
    speed: Speed = 1.0,
    scrape_interval: Interval = 15.0,
    token_budget: Budget = None,
) -> None:
    """Write alert rules and dashboards for the objectives, and say how soon the rules tell."""
    objectives = load(config, os.environ).promised()
    timings = Timings(
        speed=speed,
        scrape_interval_s=scrape_interval,
        evaluation_interval_s=2 * scrape_interval,
    )
    links = Links(dashboards, runbooks, webhook, deadman, secrets)
    alerts = render_alerts(objectives, timings, links, budget_usd=token_budget)
    texts = {**alerts, **render_kubernetes(alerts), **render_dashboards(objectives)}
    written = write(into, texts)
    console = Console()
    for path in written:
        console.print(f"wrote {path}", highlight=False)
    console.print(detection_table(objectives, timings))
    for row in shortcomings(objectives):
        console.print(f"Objective {row.objective}, {row.rule}: {row.reason}.", highlight=False)


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
    named: list[tuple[str, Burn | Outage]] = []
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
