"""Settings from text, as a file would bring them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.errors import SettingsInvalid
from agent.settings import Settings, load


def read(folder: Path, text: str, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings of a file with this text, under this environment and no other."""
    return load(written(folder, text), environment or {})


def problems(
    folder: Path, text: str = "", environment: Mapping[str, str] | None = None
) -> list[str]:
    """What is said against a file with this text."""
    with pytest.raises(SettingsInvalid) as caught:
        read(folder, text, environment)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def problem(folder: Path, text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """The one thing that is said against a file with this text."""
    (only,) = problems(folder, text, environment)
    return only


def written(folder: Path, text: str) -> Path:
    """A file with this text."""
    file = folder / "agent.yml"
    file.write_text(text, encoding="utf-8")
    return file
