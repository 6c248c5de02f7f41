"""The commands of `goodput-agent`."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop
import yaml
from rich.logging import RichHandler

from agent import __version__
from agent import app as agent_app
from agent.app.supervising import SETTINGS_INVALID, SIGNALS
from agent.checking import read_once
from agent.comparing import compare_runs
from agent.demo import simulated_engine
from agent.errors import AgentError, SettingsInvalid
from agent.estimating import estimate
from agent.rendering import render
from agent.reporting import report
from agent.settings import Settings, load
from agent.sources.proxy.handover.place import HandoverPlace
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.rollup_store import RollupStore

main = typer.Typer(
    name="goodput-agent",
    help="A sidecar for LLM inference servers: goodput, latency, GPUs, cost and failures.",
    add_completion=False,
    no_args_is_help=True,
)
db = typer.Typer(help="The database.", no_args_is_help=True)
main.add_typer(db, name="db")
main.command("compare")(compare_runs)
main.command()(estimate)
main.command()(render)
main.command()(report)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file with the settings.", dir_okay=False)
]

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let other machines in without a token.")
]


def _day(option: str, meaning: str) -> Any:
    return typer.Option(option, formats=["%Y-%m-%d"], help=meaning)


def _log_to_stderr() -> None:
    handler: logging.Handler = logging.StreamHandler()
    if sys.stderr.isatty():
        handler = RichHandler(show_path=False)
    logging.basicConfig(
        level=logging.INFO,
        format="%(message)s" if sys.stderr.isatty() else "%(asctime)s %(levelname)s %(message)s",
        handlers=[handler],
    )
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _settings(config: Path | None, *, insecure: bool = False) -> Settings:
    return load(config, _environment(insecure))


def _environment(insecure: bool) -> dict[str, str]:
    given = {"GOODPUT_SECURITY__INSECURE": "true"} if insecure else {}
    return {**os.environ, **given}


def _settings_with(engine: str, config: Path | None, *, insecure: bool) -> Settings:
    """The settings with the one engine of the command line."""
    named = {"GOODPUT_ENGINES__0__NAME": "engine-0", "GOODPUT_ENGINES__0__URL": engine}
    given = _environment(insecure)
    others = {k: v for k, v in given.items() if not k.startswith("GOODPUT_ENGINES")}
    if named.keys() & given.keys() or load(config, others).engines:
        raise SettingsInvalid(["--engine: the settings have engines as well; remove one of them"])
    return load(config, {**given, **named})


def _run(work: Coroutine[Any, Any, None]) -> None:
    # Only a signal cancels the work, and a stop by signal is no failure.
    with (
        suppress(asyncio.CancelledError),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(work)


def _run_agent(
    settings: Settings, again: Callable[[], Settings], *, simulated: bool = False
) -> None:
    """Run an agent in this process; where it has a proxy, in one of several processes.

    `again` loads the settings as they are then.
    """

    def work(place: HandoverPlace | None) -> None:
        _run(agent_app.run(settings, simulated=simulated, handover=place))

    def agent(place: HandoverPlace) -> int:
        try:
            work(place)
        except AgentError as error:
            _report(error)
            return SETTINGS_INVALID if isinstance(error, SettingsInvalid) else 1
        return 0

    if settings.proxy.listen is None:
        # This program may have been a supervisor before SIGHUP.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        work(None)
    else:
        raise typer.Exit(agent_app.run_processes(settings, agent, again))


def _demo_goes_on() -> NoReturn:
    raise SettingsInvalid(["the demo cannot start anew; stop it and start it again"])


@main.command()
def run(
    config: ConfigFile = None,
    engine: Annotated[
        str | None, typer.Option(help="URL of one engine to watch, without a settings file.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Watch engines until stopped."""
    _log_to_stderr()

    def watched() -> Settings:
        settings = (
            _settings(config, insecure=insecure)
            if engine is None
            else _settings_with(engine, config, insecure=insecure)
        )
        if not settings.engines:
            raise SettingsInvalid(
                ["no engine is set; give --engine http://host:port, or a file with --config"]
            )
        return settings

    _run_agent(watched(), watched)


@main.command()
def demo(config: ConfigFile = None, insecure: Insecure = False) -> None:
    """Watch a simulated engine, to try the agent without a GPU."""
    _log_to_stderr()
    with simulated_engine(_settings(config, insecure=insecure)) as settings:
        _run_agent(settings, _demo_goes_on, simulated=True)


@main.command()
def check(
    config: ConfigFile = None,
    engines: Annotated[
        bool,
        typer.Option(
            "--engines", help="Read each engine once instead, and list the facts it does not give."
        ),
    ] = False,
) -> None:
    """List every problem of the settings, or print the settings in force."""
    settings = _settings(config)
    if engines:
        read = list(read_once(settings.engines, time.time()))
        typer.echo("\n".join(line for _, line in read))
        raise typer.Exit(0 if all(known for known, _ in read) else 1)
    # This does not connect; it checks that the URL names a supported database.
    open_engine(settings.storage.url)
    typer.echo(yaml.safe_dump(settings.shown(), sort_keys=False), nl=False)


@db.command("upgrade")
def db_upgrade(config: ConfigFile = None) -> None:
    """Migrate the database to the newest revision."""
    settings = _settings(config)
    engine = open_engine(settings.storage.url)
    before, after = upgrade(engine)
    typer.echo(f"the database is at revision {after} (was {before})")


@db.command("rebuild")
def db_rebuild(
    from_day: Annotated[datetime, _day("--from", "The first day in UTC.")],
    until_day: Annotated[datetime, _day("--until", "The day after the last one.")],
    config: ConfigFile = None,
) -> None:
    """Rebuild the rollups of whole days from the stored requests."""
    settings = _settings(config)
    first, end = (day.replace(tzinfo=UTC) for day in (from_day, until_day))
    kept = datetime.now(UTC) - timedelta(seconds=settings.storage.keep_requests)
    # A request that ended on a day may have started on the day before, and rows expire by start.
    if first - timedelta(days=1) < kept:
        soonest = (kept + timedelta(days=2)).date()
        raise SettingsInvalid([f"--from: requests of days before {soonest} have expired"])
    if end <= first:
        raise SettingsInvalid(["--until: must be a later day than --from"])
    engine = open_engine(settings.storage.url)
    upgrade(engine)
    rollups = RollupStore(engine, settings.name, settings.storage.max_series)
    rollups.rebuild(int(first.timestamp()), int(end.timestamp()))
    typer.echo(f"rebuilt the rollups of {settings.name}: {(end - first).days} days")


@main.command()
def version() -> None:
    """Show the version."""
    typer.echo(__version__)


def command() -> None:
    """The console script: prints an AgentError as a sentence, without a traceback."""
    try:
        main(prog_name="goodput-agent")
    except AgentError as error:
        _report(error)
        raise SystemExit(2) from error


def _report(error: AgentError) -> None:
    typer.echo(f"goodput-agent: {error}", err=True)
