"""Published configurations of well-known models, and what their makers say of them.

Each file of `tests/data/model_configs` holds a `config`, retyped from `source` as far as shapes
depend on it, and the published figures with where they are told.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agent.records.model import ModelShape
from agent.sources.model_config import read_model

FOLDER = Path(__file__).parents[2] / "data/model_configs"

PUBLISHED: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))
}


def read_config(config: dict[str, Any], **asked: Any) -> ModelShape:
    """The shape of a configuration that is not on disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        return read_model(file, **asked)


@cache
def published(name: str) -> ModelShape:
    """The shape of a published model."""
    return read_config(PUBLISHED[name]["config"])
