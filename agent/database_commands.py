"""The `db` commands: migrate the database, and rebuild its rollups."""

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from agent.catalog.time_units import DAY_S
from agent.command_options import AsJson, ConfigFile
from agent.errors import SettingsInvalid
from agent.settings import load
from agent.terminal import TerminalConsole, echo, progress_bar

db = typer.Typer(
    help="Migrate the database, or rebuild its rollups (`run` migrates it by itself).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def _day(option: str, meaning: str) -> Any:
    return typer.Option(option, formats=["%Y-%m-%d"], help=meaning)


@db.command("upgrade")
def db_upgrade(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """Migrate the database of the settings to the newest revision; it is made if absent."""
    from agent.store.connection import open_engine
    from agent.store.migrating import upgrade

    engine = open_engine(load(config, os.environ).storage.url)
    with TerminalConsole(stderr=True).status("migrating the database"):
        before, after = upgrade(engine)
    text = f"the database is at revision {after} (was {before})"
    _print(text, as_json=as_json, revision=after, was=before)


@db.command("rebuild")
def db_rebuild(
    from_day: Annotated[datetime, _day("--from", "The first day in UTC.")],
    until_day: Annotated[datetime, _day("--until", "The day after the last one.")],
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the rollups of whole days from the stored requests."""
    from agent.store.clickhouse.connecting import CLICKHOUSE
    from agent.store.connection import open_engine
    from agent.store.migrating import upgrade
    from agent.store.rollup_store import RollupStore

    settings = load(config, os.environ)
    first, end = (day.replace(tzinfo=UTC) for day in (from_day, until_day))
    kept = datetime.now(UTC) - timedelta(seconds=settings.storage.keep_requests)
    # A request that ended on a day may have started on the day before, and rows expire by start.
    if first < kept + timedelta(days=1):
        soonest = (kept + timedelta(days=2)).date()
        raise SettingsInvalid([f"--from: requests of days before {soonest} have expired"])
    if end <= first:
        raise SettingsInvalid(["--until: must be a later day than --from"])
    if end > datetime.now(UTC) + timedelta(days=2):
        raise SettingsInvalid(["--until: lies in the future; give tomorrow at the latest"])
    engine = open_engine(settings.storage.url)
    if engine.dialect.name == CLICKHOUSE:
        raise SettingsInvalid(
            [
                "storage.url: rollups of ClickHouse are not rebuilt from rows: it adds up what "
                "agents forward"
            ]
        )
    upgrade(engine)
    rollups = RollupStore(engine, settings.name, settings.storage.max_series)
    days = (end - first).days
    with progress_bar("rebuilding", days) as done:
        for day in range(int(first.timestamp()), int(end.timestamp()), DAY_S):
            rollups.rebuild(day, day + DAY_S)
            done()
    text = f"rebuilt the rollups of {settings.name}: {days} days"
    _print(text, as_json=as_json, agent=settings.name, days=days)


def _print(text: str, *, as_json: bool, **values: Any) -> None:
    echo(json.dumps(values, indent=2) if as_json else text)
