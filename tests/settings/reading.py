"""Reads settings from YAML text, through a file."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.errors import SettingsInvalid
from agent.settings import Settings, load


def read(folder: Path, text: str, environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a file with this text, under this environment alone."""
    return load(write_settings(folder, text), environment or {})


def problems(
    folder: Path, text: str = "", environment: Mapping[str, str] | None = None
) -> list[str]:
    """Return the problems that reading a file with this text raises, without their place."""
    with pytest.raises(SettingsInvalid) as caught:
        read(folder, text, environment)
    assert str(caught.value) == "\n".join(caught.value.problems)
    place = rf"{re.escape(str(folder))}/agent\.yml:\d+: |GOODPUT_\w+: (?=[a-z_]+[.\[:])"
    return [re.sub(f"^({place})", "", sentence) for sentence in caught.value.problems]


def problem(folder: Path, text: str = "", environment: Mapping[str, str] | None = None) -> str:
    """Return the only problem of a file with this text."""
    (only,) = problems(folder, text, environment)
    return only


def write_settings(folder: Path, text: str) -> Path:
    """Write a file with this text and return its path."""
    file = folder / "agent.yml"
    file.write_text(text, encoding="utf-8")
    return file


def storage_variables(url: str) -> dict[str, str]:
    """The variables by which commands read the database at this URL."""
    file = url.removeprefix("sqlite:///")
    return {"GOODPUT_STORAGE__PUBLISH_TO" if file == url else "GOODPUT_STORAGE__FILE": file}
