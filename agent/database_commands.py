"""The `db` commands: migrate the database, and rebuild its rollups."""

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from agent.catalog.time_units import DAY_S
from agent.command_options import AsJson, ConfigFile
from agent.errors import SettingsInvalid
from agent.settings import StorageSettings, load
from agent.settings.values import duration_text
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
    """Migrate the agent's file, which is made if absent, and the shared database if one is set."""
    storage = load(config, os.environ).storage
    shared = storage.publish_to
    upgraded = {
        "file": _upgraded(storage.own_url),
        "publish_to": None if shared is None else _upgraded(shared),
    }
    lines = [
        f"{_DATABASES[key]} is at revision {each['revision']} (was {each['was']})"
        for key, each in upgraded.items()
        if each is not None
    ]
    _print("\n".join(lines), as_json=as_json, **upgraded)


_DATABASES = {"file": "the agent's file", "publish_to": "the shared database"}


def _upgraded(url: str) -> dict[str, str | None]:
    """Migrate a database; returns its revision, and the one before."""
    from agent.store.connection import open_engine
    from agent.store.migrating import upgrade

    engine = open_engine(url)
    with TerminalConsole(stderr=True).status("migrating the database"):
        was, revision = upgrade(engine)
    engine.dispose()
    return {"revision": revision, "was": was}


@db.command("rebuild")
def db_rebuild(
    from_day: Annotated[datetime, _day("--from", "The first day in UTC.")],
    until_day: Annotated[datetime, _day("--until", "The day after the last one.")],
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the rollups of whole days in the agent's file from its requests."""
    from agent.store.connection import open_engine
    from agent.store.folding import RollupStore
    from agent.store.migrating import upgrade

    settings = load(config, os.environ)
    first, end = (day.replace(tzinfo=UTC) for day in (from_day, until_day))
    storage = settings.storage
    _require_rows(storage, first)
    if end <= first:
        raise SettingsInvalid(["--until: must be a later day than --from"])
    if end > datetime.now(UTC) + timedelta(days=2):
        raise SettingsInvalid(["--until: lies in the future; give tomorrow at the latest"])
    engine = open_engine(storage.own_url)
    upgrade(engine)
    rollups = RollupStore(engine, settings.name, storage.max_series)
    days = (end - first).days
    with progress_bar("rebuilding", days) as done:
        for day in range(int(first.timestamp()), int(end.timestamp()), DAY_S):
            rollups.rebuild(day, day + DAY_S)
            done()
    text = f"rebuilt the rollups of {settings.name}: {days} days"
    _print(text, as_json=as_json, agent=settings.name, days=days)


def _require_rows(storage: StorageSettings, first: datetime) -> None:
    """Raises SettingsInvalid unless the agent's file has all requests from the first day on."""
    kept = datetime.now(UTC) - timedelta(seconds=storage.kept_in_file_s)
    # A request that ended on a day may have started on the day before, and rows expire by start.
    if first < kept + timedelta(days=1):
        soonest = (kept + timedelta(days=2)).date()
        is_cut = storage.kept_in_file_s < storage.keep_requests
        setting = "keep_in_file" if is_cut else "keep_requests"
        raise SettingsInvalid(
            [
                f"--from: requests of days before {soonest} have expired in {storage.file}, which "
                f"has them for {duration_text(storage.kept_in_file_s)} (storage.{setting})"
            ]
        )


def _print(text: str, *, as_json: bool, **values: Any) -> None:
    echo(json.dumps(values, indent=2) if as_json else text)
