"""The commands `audit`, of a live deployment, and `config check`, of settings and expositions."""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from agent.catalog.engines import DIALECTS
from agent.command_options import AsJson, ConfigFile, TokenFile, server_url
from agent.errors import SettingsInvalid
from agent.settings import Settings, load
from agent.settings.named_files import in_time
from agent.settings.values import masked
from agent.sources.engines.translate import expected_facts
from agent.terminal import echo

if TYPE_CHECKING:
    from agent.sources.engines.engine_source import ScrapeResult

ReadAll = Annotated[
    bool,
    typer.Option("--engines", help="Read each engine once instead, and list the facts it lacks."),
]
EngineUrl = Annotated[
    str, typer.Argument(metavar="URL", help="The engine, as http://127.0.0.1:8000.")
]
SettingsFile = Annotated[
    Path | None,
    typer.Argument(parser=Path, metavar="FILE", help="YAML file with the settings."),
]
AgentToAsk = Annotated[
    str | None,
    typer.Option(
        "--agent",
        metavar="URL",
        help="The running agent to ask about spans and traffic. Default: that of the settings.",
    ),
]
Send = Annotated[
    bool,
    typer.Option("--send-request", help="Send the engine one tiny request and wait for its row."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="File with the engine's API key.", parser=Path, metavar="FILE"),
]


def audit(
    url: EngineUrl,
    *,
    agent: AgentToAsk = None,
    send_request: Send = False,
    config: ConfigFile = None,
    token_file: TokenFile = None,
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Audit a running engine: is it set up well?

    Each line passes, warns, fails or is unknown, with what was seen and which flag to change. Exits
    with 0 if no line fails, 1 if one does, 2 if the engine cannot be read.

    Example: `audit http://127.0.0.1:8000 --send-request`.
    """
    from agent.auditing import audit_deployment

    code = audit_deployment(
        server_url("URL", url),
        load(config, os.environ),
        agent_url=agent and server_url("--agent", agent),
        token_file=token_file,
        key_file=key_file,
        send=send_request,
        as_json=as_json,
    )
    raise typer.Exit(code)


config = typer.Typer(help="Check the settings.", no_args_is_help=True, rich_markup_mode="markdown")


@config.command("check")
def config_check(
    file: SettingsFile = None,
    *,
    config: ConfigFile = None,
    engines: ReadAll = False,
    as_json: AsJson = False,
) -> None:
    """Print the settings in force, those of environment variables included, or list all problems.

    Exits with 2 if a setting is invalid, or if one of their files is missing or cannot be read.

    Example: `config check agent.yml`.
    """
    if file is not None and config is not None:
        raise SettingsInvalid(["--config: give one file, as --config FILE or as FILE alone"])
    settings = load(file or config, os.environ)
    if engines:
        raise typer.Exit(_print_facts(settings, as_json=as_json))
    _print_settings(settings, as_json=as_json)


def check(context: typer.Context) -> None:
    """Name the command that replaces this one."""
    words = [part for word in context.args for part in word.split("=", 1)]
    engine, file = _taken(words, "--engine"), _taken(words, "--config")
    if engine is not None:
        options = [] if file is None else ["--config", file]
        command = ["audit", masked(engine), *words, *options]
    else:
        command = ["config", "check", *([] if file is None else [file]), *words]
    raise SettingsInvalid([f"check is now `goodput-agent {shlex.join(command)}`"])


def _taken(words: list[str], option: str) -> str | None:
    """Remove an option from the words; returns its value."""
    if option not in words[:-1]:
        return None
    place = words.index(option)
    words.pop(place)
    return words.pop(place)


def _print_settings(settings: Settings, *, as_json: bool) -> None:
    from agent.store.connection import open_engine

    # This does not connect; it checks that the database's driver reads the URL.
    open_engine(settings.storage.read_url)
    check_files(settings)
    shown = settings.shown()
    echo(
        json.dumps(shown, indent=2) if as_json else yaml.safe_dump(shown, sort_keys=False).rstrip()
    )


# Parameters of a database's URL with the name of a file, in libpq and in ClickHouse's driver, and
# the values that mean the system's authorities.
_DATABASE_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "ca_cert", "client_cert")
_SYSTEM = ("system", "certifi")

# A setting, its file, and a look at the file, which raises OSError.
_NamedFile = tuple[str, Path | None, Callable[[Path], None]]


def check_files(settings: Settings) -> None:
    """Open each file that the settings name, and read those that the agent reads at its start.

    Raises SettingsInvalid with all that are missing or unreadable, else with the first one whose
    content is wrong.
    """
    from agent.app.listeners import ConnectionLimits, Listeners, raise_descriptors

    files = chain(_files(settings), _engine_files(settings), _storage_files(settings))
    problems = [
        f"{key}: {path} cannot be used: {why}"
        for key, path, look in files
        if path is not None and (why := _problem(path, look))
    ]
    if problems:
        raise SettingsInvalid(problems)
    Listeners(settings, ConnectionLimits(raise_descriptors()))


def _files(settings: Settings) -> Iterator[_NamedFile]:
    security = settings.security
    yield "security.read_tokens", security.read_tokens, _open
    yield "security.ingest_tokens", security.ingest_tokens, _open
    yield "security.tls_certificate", security.tls_certificate, _open
    yield "security.tls_key", security.tls_key, _open
    yield "tls.ca", settings.tls.ca, _open
    kubernetes = settings.engines_from.kubernetes
    # The default exists in pods alone.
    if kubernetes is not None and "service_account" in kubernetes.model_fields_set:
        for name in ("token", "ca.crt"):
            file = Path(kubernetes.service_account) / name
            yield "engines_from.kubernetes.service_account", file, _open


def _engine_files(settings: Settings) -> Iterator[_NamedFile]:
    kubernetes = settings.engines_from.kubernetes
    if kubernetes is not None:
        yield "engines_from.kubernetes.model_config", kubernetes.model_config_path, _open_model
    for number, engine in enumerate(settings.engines):
        section = f"engines[{number}]"
        yield f"{section}.model_config", engine.model_config_path, _open_model
        yield f"{section}.log", engine.log, _open
        yield f"{section}.plugin_socket", engine.plugin_socket, _find_folder


def _storage_files(settings: Settings) -> Iterator[_NamedFile]:
    from sqlalchemy import make_url

    storage = settings.storage
    yield "storage.file", Path(storage.file), _find_folder
    for name, value in make_url(storage.read_url).query.items():
        if name in _DATABASE_FILES and value not in _SYSTEM:
            yield f"storage.publish_to: {name}", Path(str(value)), _open


def _problem(path: Path, look: Callable[[Path], None]) -> str | None:
    try:
        in_time(path, partial(look, path))
    except OSError as error:
        return error.strerror or str(error)
    return None


def _open(path: Path) -> None:
    """Open and close a file, or a named pipe that may have no writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # A directory can be opened, but not read.
        os.read(descriptor, 0)
    finally:
        os.close(descriptor)


def _open_model(path: Path) -> None:
    _open(path / "config.json" if path.is_dir() else path)


def _find_folder(path: Path) -> None:
    """Look for the folder of a file that the agent makes."""
    if not path.parent.is_dir():
        raise OSError(f"the folder {path.parent} is missing")


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
        return FoundFacts(engine=name, problem=result.problem)
    given = {fact for fact, _ in sample.facts} | sample.histograms.keys()
    return FoundFacts(
        engine=name,
        problem=None,
        dialect=sample.dialect,
        model=sample.model,
        facts=len(given),
        absent=tuple(sorted(expected_facts(DIALECTS[sample.dialect]) - given)),
    )
