"""Published configurations of well-known models, and their published figures.

Each file of `tests/data/model_configs` holds a `config`, retyped from `source` as far as shapes
depend on it, and the published figures with their sources.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agent.records.model import ModelShape
from agent.sources.model_config import read_model

FOLDER = Path(__file__).parents[2] / "data/model_configs"
# Files of models that were published in 2025 and 2026, as they are.
FOREIGN_CONFIGS = Path(__file__).parents[2] / "data/foreign/configs"

PUBLISHED: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json"))
}


def read_config(config: dict[str, Any], **overrides: Any) -> ModelShape:
    """The shape of a configuration that is not on disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(config))
        return read_model(file, **overrides)


@cache
def published(name: str) -> ModelShape:
    return read_config(PUBLISHED[name]["config"])
