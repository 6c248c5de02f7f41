"""Adds the agent's measuring to the package: see vendoring.py."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).parent


class CustomBuildHook(BuildHookInterface):
    """Copies from the repository; what is unpacked of an sdist has the copies already."""

    _copies: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files for the build."""
        sys.path.insert(0, str(HERE))
        from vendoring import CORE, PACKAGE, vendored

        repository = HERE.parents[1]
        if not (repository / "agent").is_dir():
            build_data["force_include"][str(HERE / PACKAGE / CORE)] = f"{PACKAGE}/{CORE}"
            return
        self._copies = TemporaryDirectory()
        copies = Path(self._copies.name)
        for path, content in vendored(repository).items():
            (copies / path).parent.mkdir(parents=True, exist_ok=True)
            (copies / path).write_text(content)
            build_data["force_include"][str(copies / path)] = f"{PACKAGE}/{path}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete the copies."""
        if self._copies is not None:
            self._copies.cleanup()
