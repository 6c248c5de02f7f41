"""Fixtures: a database."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.store.migrated import migrated_in


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    with migrated_in(tmp_path) as engine:
        yield engine
