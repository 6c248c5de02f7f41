"""Options that several commands have, and the files and URLs that options name."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from agent.errors import SettingsInvalid
from agent.settings.named_files import read_named_file
from agent.settings.values import HttpUrl

# `parser` makes it a path without a look at the file, whose file system may hang.
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", parser=Path, metavar="FILE", help="YAML file with the settings."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with a read token of the agent.", parser=Path, metavar="FILE"),
]
AgentUrl = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Read from a running agent, as http://127.0.0.1:9470. Default: the database of the "
        "settings (`storage.publish_to`, else `storage.file`), also while the agent is down.",
    ),
]
_LAST = typer.Option(metavar="LENGTH", help="Length of the window, which ends now: 1h, 24h, 30d.")
Last = Annotated[str, _LAST]
LastOrNone = Annotated[str | None, _LAST]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text.")]


def secret_in(option: str, file: Path) -> str:
    """The token or key that a file holds. Raises SettingsInvalid."""
    try:
        words = read_named_file(file).decode("utf-8").split()
    except OSError as error:
        raise SettingsInvalid([f"{option}: {file} cannot be read: {error}"]) from error
    except UnicodeDecodeError:
        words = []
    if len(words) != 1:
        raise SettingsInvalid([f"{option}: {file} must hold one key or token and nothing else"])
    return words[0]


def write_text(option: str, file: Path, text: str) -> None:
    """Write a file, and the folders that it is in. Raises SettingsInvalid."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsInvalid([f"{option}: {file} cannot be written: {error.strerror}"]) from error


def server_url(option: str, given: str) -> str:
    """The URL of a server. Raises SettingsInvalid."""
    try:
        TypeAdapter(HttpUrl).validate_python(given)
    except ValidationError as error:
        raise SettingsInvalid(
            [f"{option}: {each['ctx']['error']}" for each in error.errors()]
        ) from error
    return given
