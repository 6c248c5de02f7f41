"""Copies the agent's modules that the middleware uses into the package, under its own name.

So the package needs no agent in vLLM's environment, and both measure with the same code. A file is
copied if another one imports it, beginning with core.py. `agent` becomes
`goodput_agent_vllm.agent`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "goodput_agent_vllm"
CORE = "core.py"
_IMPORT = re.compile(r"^(\s*(?:from|import)) agent\b", re.MULTILINE)


def vendored(root: Path) -> dict[str, str]:
    """The files to add to the package by their paths in it, with their content.

    `root` is the folder of `agent` and `plugins`.
    """
    core = root / "plugins" / "vllm" / PACKAGE / CORE
    files = {CORE: core.read_text()}
    waiting = list(_modules_in(files[CORE], root))
    while waiting:
        module = waiting.pop()
        path = str(module.relative_to(root))
        if path not in files:
            files[path] = module.read_text()
            waiting += _modules_in(files[path], root)
    return {path: _IMPORT.sub(rf"\1 {PACKAGE}.agent", text) for path, text in files.items()}


def _modules_in(source: str, root: Path) -> Iterator[Path]:
    """The files of the agent that a source imports, and those of the packages around them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agent":
            yield from _files_of(node.module or "", [alias.name for alias in node.names], root)


def _files_of(module: str, names: list[str], root: Path) -> Iterator[Path]:
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        init = root.joinpath(*parts[:end], "__init__.py")
        if init.exists():
            yield init
    folder = root.joinpath(*parts)
    single = folder.with_suffix(".py")
    if single.exists():
        yield single
    for name in names:
        if (folder / f"{name}.py").exists():
            yield folder / f"{name}.py"
