"""The `check` command: of the settings, of what expositions give, or of a live deployment."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from agent.catalog.engines import DIALECTS
from agent.command_options import AsJson, ConfigFile, TokenFile, server_url
from agent.settings import Settings, load
from agent.sources.engines.name_drift import expected_facts
from agent.terminal import echo

if TYPE_CHECKING:
    from agent.sources.engines.engine_source import ScrapeResult

ReadAll = Annotated[
    bool,
    typer.Option("--engines", help="Read each engine once instead, and list the facts it lacks."),
]
EngineUrl = Annotated[
    str | None,
    typer.Option("--engine", metavar="URL", help="Audit the live deployment of this engine."),
]
AgentUrl = Annotated[
    str | None,
    typer.Option(
        "--agent",
        metavar="URL",
        help="The running agent to ask about spans and traffic. Default: that of the settings.",
    ),
]
Send = Annotated[
    bool,
    typer.Option("--send-request", help="Send the engine one tiny request and wait for its span."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the engine's API key.", parser=Path, metavar="FILE"),
]


def check(
    *,
    config: ConfigFile = None,
    engines: ReadAll = False,
    engine: EngineUrl = None,
    agent: AgentUrl = None,
    send_request: Send = False,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Check a deployment (`--engine`), or the settings, of which all problems are listed.

    With `--engine URL` it audits the running engine: each line passes, warns, fails or is unknown,
    with what was seen and which flag to change. Exits with 0 if no line fails, 1 if one
    does, 2 if the engine cannot be read.

    Without it, it prints the settings in force. Example:
    `check --engine http://127.0.0.1:8000 --send-request`.
    """
    from agent.auditing import audit_deployment

    settings = load(config, os.environ)
    if engine is not None:
        code = audit_deployment(
            server_url("--engine", engine),
            settings,
            agent_url=agent and server_url("--agent", agent),
            token_file=token_file,
            key_file=key_file,
            send=send_request,
            as_json=as_json,
        )
        raise typer.Exit(code)
    if engines:
        raise typer.Exit(_print_facts(settings, as_json=as_json))
    _print_settings(settings, as_json=as_json)


def _print_settings(settings: Settings, *, as_json: bool) -> None:
    from agent.store.connection import open_engine

    # This does not connect; it checks that the URL names a supported database.
    open_engine(settings.storage.url)
    shown = settings.shown()
    echo(
        json.dumps(shown, indent=2) if as_json else yaml.safe_dump(shown, sort_keys=False).rstrip()
    )


def _print_facts(settings: Settings, *, as_json: bool) -> int:
    """Print what each engine gives; 1 if one cannot be read, else 0."""
    read = list(read_once(settings, time.time()))
    if as_json:
        echo(json.dumps({"engines": [each.values() for each in read]}, indent=2))
    else:
        echo("\n".join(str(each) for each in read))
    return 1 if any(each.problem for each in read) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundFacts:
    """What one exposition of an engine holds and lacks, or why it cannot be read."""

    engine: str
    problem: str | None
    dialect: str | None = None
    model: str | None = None
    facts: int | None = None
    absent: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """It, for JSON; what is absent is unknown if nothing could be read."""
        return {**asdict(self), "absent": None if self.problem else list(self.absent)}

    def __str__(self) -> str:
        return f"engine {self.engine}: {self._described()}"

    def _described(self) -> str:
        if self.problem is not None:
            return f"cannot be read: {self.problem}"
        said = f"{self.dialect}, model {self.model or 'unknown'}, {self.facts} facts"
        if not self.absent:
            return f"{said}, none is absent"
        return (
            f"{said}; absent: {', '.join(self.absent)} (some engines give a fact from its first "
            "use on, and older releases do not give all)"
        )


def read_once(settings: Settings, now: float) -> Iterator[FoundFacts]:
    """Reads the exposition of each engine once."""
    from agent.sources.engines.engine_source import EngineSource
    from agent.sources.engines.fetch import open_session

    for engine in settings.engines:
        with open_session(settings.tls.ca) as session:
            source = EngineSource(
                name=engine.name, url=engine.url, kind=engine.kind, session=session
            )
            yield _engine_read(engine.name, source.read(now))


def _engine_read(name: str, result: "ScrapeResult") -> FoundFacts:
    sample = result.sample
    if sample is None:
        return FoundFacts(engine=name, problem=str(result.failure))
    given = {fact for fact, _ in sample.facts} | sample.histograms.keys()
    return FoundFacts(
        engine=name,
        problem=None,
        dialect=sample.dialect,
        model=sample.model,
        facts=len(given),
        absent=tuple(sorted(expected_facts(DIALECTS[sample.dialect]) - given)),
    )
