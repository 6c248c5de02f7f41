"""The `top` command: engines, requests, latency, GPUs and events in the terminal."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from agent.analysis.engine_counts import counts_between, total_counts
from agent.analysis.engine_figures import CountedEngine, engine_figures
from agent.command_options import AsJson, ConfigFile, TokenFile, server_url
from agent.errors import AgentError, EngineUnreachable, SettingsInvalid
from agent.outputs.overview import (
    AgentFigures,
    Overview,
    agent_overview,
    engine_overview,
    json_values,
    renderable,
)
from agent.records.engine import EngineSample
from agent.records.engine_counts import EngineCounts
from agent.terminal import TerminalConsole, echo

if TYPE_CHECKING:
    from agent.agent_api import AgentApi
    from agent.sources.engines.engine_source import EngineSource

_WINDOW, _WINDOW_S = "5m", 300.0
_EVENTS_OF = "24h"
_MOST_EVENTS = 5
_FOUND, _FORBIDDEN, _SERVER_ERROR = 200, (401, 403), 500

Where = Annotated[
    str | None,
    typer.Argument(
        metavar="URL",
        help="A running agent, or an engine without one. Default: the agent of the settings.",
        show_default=False,
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Print once and exit, as without a terminal.")]
Interval = Annotated[
    float, typer.Option(metavar="SECONDS", help="Time between two reads.", parser=float)
]


def top(
    url: Where = None,
    *,
    once: Once = False,
    interval: Interval = 2.0,
    config: ConfigFile = None,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show engines, requests, latency, GPUs and the last events, live in the terminal.

    Figures are of the last five minutes; `-` is unknown. Ctrl-C ends it.

    Examples: `top`, and `top http://127.0.0.1:8000` for an engine that no agent watches.
    """
    if not 0.05 <= interval <= 3600:
        raise SettingsInvalid([f"--interval: {interval:g} s is not from 0.05 to 3600 s"])
    console = TerminalConsole()
    with _reader(url, config, token_file) as read:
        if once or as_json or not console.is_terminal:
            found = _read_once(read, interval)
            if as_json:
                echo(json.dumps(json_values(found), indent=2))
            else:
                console.print(renderable(found))
            return
        with suppress(KeyboardInterrupt):
            _show(read, interval, console)


def _read_once(read: "Reader", interval_s: float) -> Overview:
    """An engine is read twice, as rates are between two reads."""
    found = read()
    if isinstance(read, EngineReader):
        time.sleep(interval_s)
        found = read()
    return found


def _show(read: "Reader", interval_s: float, console: TerminalConsole) -> None:
    """Show figures until Ctrl-C. While they cannot be read, the last ones stay, with the reason."""
    last = read()
    with Live(renderable(last), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                last = shown = read()
            except AgentError as error:
                shown = replace(last, notes=(*last.notes, f"not of now: {error}"))
            live.update(renderable(shown), refresh=True)


class AgentReader:
    """Reads a running agent."""

    def __init__(self, api: "AgentApi", title: str) -> None:
        self._api = api
        self._title = title

    def __call__(self) -> Overview:
        """The overview of now. Raises SettingsInvalid."""
        try:
            return agent_overview(self._title, datetime.now(UTC), self._figures())
        except KeyError as error:
            raise SettingsInvalid(
                [
                    f"{self._title} is an agent of another version, whose responses have no "
                    f"{error}; use its own version of this command"
                ]
            ) from error

    def _figures(self) -> AgentFigures:
        read = self._api
        return AgentFigures(
            summary=read("summary", window=_WINDOW),
            objectives=read("objectives", window=_WINDOW)["items"],
            engines=read("engines")["items"],
            gpus=read("gpus")["items"],
            events=read("events", window=_EVENTS_OF, limit=_MOST_EVENTS)["items"],
        )


class EngineReader:
    """Reads an engine itself, and sums up what it counted in the last minutes."""

    def __init__(self, source: "EngineSource", url: str) -> None:
        self._source = source
        self._url = url
        self._last: EngineSample | None = None
        self._parts: deque[tuple[float, EngineCounts]] = deque()

    def __call__(self) -> Overview:
        """The overview of now. Raises EngineUnreachable."""
        result = self._source.read(time.time())
        if result.sample is None:
            raise EngineUnreachable(
                result.failure or "",
                f"neither an agent nor an engine answers: {result.problem}; start it, or correct "
                "the address",
            )
        total = self._counted(result.sample)
        figures = None
        if total is not None:
            figures = engine_figures([CountedEngine(model=result.sample.model, counts=total)], ())
        return engine_overview(self._url, result.sample, figures)

    def _counted(self, sample: EngineSample) -> EngineCounts | None:
        if self._last is not None:
            counts = counts_between(self._last, sample)
            if counts is not None:
                self._parts.append((sample.at, counts))
        self._last = sample
        while self._parts and self._parts[0][0] < sample.at - _WINDOW_S:
            self._parts.popleft()
        return total_counts(counts for _, counts in self._parts)


Reader = AgentReader | EngineReader


@contextmanager
def _reader(url: str | None, config: Path | None, token_file: Path | None) -> Iterator[Reader]:
    """A reader of the agent at a URL, or of the engine if no agent answers there."""
    from agent.agent_api import open_agent, own_agent
    from agent.settings import load
    from agent.sources.engines.engine_source import EngineSource
    from agent.sources.engines.fetch import open_session

    settings = load(config, os.environ)
    own_url, own_token = own_agent(settings)
    where = own_url if url is None else server_url("URL", url)
    token_file = token_file or (own_token if url is None else None)
    with open_agent(where, token_file, settings.tls.ca) as api:
        if url is None or _is_agent(api):
            yield AgentReader(api, where)
            return
    # What cannot be read is said once, by the command.
    logging.getLogger("agent").addHandler(logging.NullHandler())
    with open_session(settings.tls.ca) as session:
        yield EngineReader(EngineSource(name="engine", url=where, session=session), where)


def _is_agent(api: "AgentApi") -> bool:
    """Whether an agent answers, also one that asks for a token or says what fails now."""
    try:
        status, body = api.read("/api/v1/agents")
    except SettingsInvalid:
        return False
    failing = status >= _SERVER_ERROR and "detail" in body
    return status == _FOUND or status in _FORBIDDEN or failing
