"""The commands of `goodput-agent`."""

import asyncio
import json
import os
import signal
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from agent import __version__
from agent.app.supervising import ERROR_PREFIX, SETTINGS_INVALID, SIGNALS, TRY, Trial, kept_imports
from agent.assistants import mcp
from agent.checking import audit, check, config
from agent.command_options import AsJson, ConfigFile, server_url
from agent.comparing import compare_runs
from agent.database_commands import db
from agent.errors import AgentError, SettingsInvalid
from agent.estimating import estimate
from agent.rendering import render
from agent.reporting import report
from agent.settings import Settings, load
from agent.suggesting import objectives
from agent.terminal import LogFormat, LogLevel, echo, log_to_stderr
from agent.top import top

# What a command needs is imported when it runs: help, and a shell that completes, do not wait.
if TYPE_CHECKING:
    from agent.app.engines import GpuSource
    from agent.sources.proxy.handover.messages import HandoverAddress

HELP = """A sidecar for LLM inference servers: goodput, latency, GPUs, cost and failures.

- Try it without a GPU: `goodput-agent demo`
- Watch your engine: `goodput-agent run --engine http://127.0.0.1:8000`
- See its page: <http://127.0.0.1:9470>, or `goodput-agent top` in the terminal
- Is the engine set up well? `goodput-agent audit http://127.0.0.1:8000`
- All agents on one page: `goodput-agent serve --config serve.yml`
- What did users get? `goodput-agent report --last 24h`
- Is it better than before? `goodput-agent compare --before 24h/1h --after 1h`
- Which limits can be promised? `goodput-agent objectives suggest`
- Let an assistant read it: `goodput-agent mcp`
- Will a model fit? `goodput-agent estimate config.json --gpu H100-SXM`

`goodput-agent COMMAND --help` explains a command. Every setting has an environment variable too.
"""

main = typer.Typer(
    name="goodput-agent",
    help=HELP,
    no_args_is_help=True,
    # Joins the lines of a docstring's paragraph.
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(__version__)
        raise typer.Exit


@main.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Let other machines read without a token (see docs/security.md)."
    ),
]

Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Where the page, the API and /metrics listen, 127.0.0.1:9470 by default.",
    ),
]
Level = Annotated[
    LogLevel, typer.Option("--log-level", case_sensitive=False, help="Least level of the log.")
]
Format = Annotated[
    LogFormat, typer.Option("--log-format", help="Lines of text, or one JSON object a line.")
]


def _settings(
    config: Path | None, engines: Sequence[str] = (), *, listen: str | None, insecure: bool
) -> Settings:
    """The settings, with what the command line has of them."""
    given = {**os.environ, **_listening(listen)}
    if insecure:
        given["GOODPUT_SECURITY__INSECURE"] = "true"
    if not engines:
        return load(config, given)
    named = _engines(engines)
    others = {k: v for k, v in given.items() if not k.startswith("GOODPUT_ENGINES")}
    if named.keys() & given.keys() or load(config, others).engines:
        raise SettingsInvalid(["--engine: the settings have engines as well; remove one of them"])
    return load(config, {**given, **named})


def _engines(urls: Sequence[str]) -> dict[str, str]:
    named = {}
    for number, url in enumerate(urls):
        prefix = f"GOODPUT_ENGINES__{number}__"
        named[f"{prefix}NAME"] = f"engine-{number}"
        named[f"{prefix}URL"] = server_url("--engine", url)
    return named


def _listening(listen: str | None) -> dict[str, str]:
    if listen is None:
        return {}
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise SettingsInvalid(
            [f"--listen: {listen!r} is no address; give HOST:PORT, such as 0.0.0.0:9470"]
        )
    return {"GOODPUT_LISTEN__HOST": host.strip("[]"), "GOODPUT_LISTEN__PORT": port}


def _run(work: Coroutine[Any, Any, None]) -> None:
    # Only a signal cancels the work, and a stop by signal is not a failure.
    with (
        suppress(asyncio.CancelledError),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(work)


def _run_agent(settings: Settings, *, simulated_gpus: "GpuSource | None" = None) -> None:
    """Run an agent in this process; if it has a proxy, in one of several processes. If it
    looks for engines, in one that is started again for others.
    """

    with kept_imports():
        from agent.app.processes import run_again, run_processes, taken_by
        from agent.app.running import run as run_one

    simulated = simulated_gpus is not None
    work = partial(run_one, settings, simulated=simulated, gpus=simulated_gpus)

    def begin_trial() -> Trial:
        if simulated:
            raise SettingsInvalid(["the demo cannot start anew; stop it and start it again"])
        return Trial.of_this_program(taken_by(settings))

    def agent(handover: "HandoverAddress | None" = None) -> int:
        try:
            _run(work(handover=handover))
        except AgentError as error:
            _report(error)
            return SETTINGS_INVALID if isinstance(error, SettingsInvalid) else 1
        return 0

    if settings.proxy.listen is not None:
        # A signal that comes now waits for the supervisor, which leaves nothing behind.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        raise typer.Exit(run_processes(settings, agent, begin_trial))
    if settings.engines_from.kubernetes is not None:
        raise typer.Exit(run_again(agent, begin_trial))
    _let_stops_through()
    _run(work(begin_trial=begin_trial))


def _begin(level: LogLevel, log_format: LogFormat) -> None:
    """Log, and let a SIGHUP wait until somebody heeds it."""
    log_to_stderr(level, log_format)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def _let_stops_through() -> None:
    # They wait if this program was a supervisor before SIGHUP.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS - {signal.SIGHUP})


def run(
    config: ConfigFile = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of an engine to watch, without a settings file; may be given several times."
        ),
    ] = None,
    *,
    listen: Listen = None,
    insecure: Insecure = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> None:
    """Watch engines until stopped: with the page, the API, `/metrics` and the receivers of spans.

    Examples: `run --engine http://127.0.0.1:8000`, and `run --config agent.yml`. The page is at
    <http://127.0.0.1:9470>. Ctrl-C stops it.
    """
    _begin(log_level, log_format)
    settings = _settings(config, engine or (), listen=listen, insecure=insecure)
    if not settings.engines and settings.engines_from.kubernetes is None:
        raise SettingsInvalid(
            ["no engine is set; give --engine http://host:port, or a file with --config"]
        )
    if TRY in os.environ:
        from agent.app.processes import try_agent

        echo(try_agent(settings))
        return
    _run_agent(settings)


def demo(
    config: ConfigFile = None,
    *,
    listen: Listen = None,
    insecure: Insecure = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
    past: Annotated[
        str,
        typer.Option(
            metavar="LENGTH", help="How much simulated past to store first: 10m, 1h, at most 2h."
        ),
    ] = "24m",
) -> None:
    """Watch simulated engines, to try the agent without a GPU."""
    from agent.demo import simulated_engines

    log_to_stderr(log_level, log_format)
    settings = _settings(config, listen=listen, insecure=insecure)
    with simulated_engines(settings, past) as simulated:
        _run_agent(simulated.settings, simulated_gpus=simulated.gpus)


def serve(
    config: ConfigFile = None,
    *,
    listen: Listen = None,
    insecure: Insecure = False,
    log_level: Level = LogLevel.INFO,
    log_format: Format = LogFormat.TEXT,
) -> None:
    """Show the page and the API of all agents that publish to one database, without an engine.

    Example: `serve --config serve.yml`, where `storage.publish_to` is that database. It is only
    read. For users without Grafana: agents report their version, when they were last seen, and
    their lag.
    """
    from agent.app import serving

    _begin(log_level, log_format)
    settings = _settings(config, listen=listen, insecure=insecure)
    if TRY in os.environ:
        echo(serving.try_serving(settings))
        return
    _let_stops_through()
    _run(serving.serve(settings))


def version(as_json: AsJson = False) -> None:
    """Show the version."""
    echo(json.dumps({"version": __version__}) if as_json else __version__)


# In the order of the help.
main.command()(run)
main.command()(demo)
main.command()(serve)
main.command()(top)
main.command()(audit)
main.add_typer(config, name="config")
main.command()(report)
main.command("compare")(compare_runs)
main.add_typer(objectives, name="objectives")
main.command()(estimate)
main.command()(mcp)
main.command(epilog="`GOODPUT_RENDER_SLACK_PAGES` sets `--slack-pages`, and so on.")(render)
main.add_typer(db, name="db")
main.command()(version)
# Names that others have replaced.
_ANY_WORDS = {"ignore_unknown_options": True, "allow_extra_args": True}
main.command(hidden=True, add_help_option=False, context_settings=_ANY_WORDS)(check)


def command() -> None:
    """The console script: prints an AgentError as a sentence, without a traceback."""
    try:
        main(prog_name="goodput-agent")
    except AgentError as error:
        _report(error)
        raise SystemExit(2) from error


def _report(error: AgentError) -> None:
    echo(f"{ERROR_PREFIX}{error}", err=True)
