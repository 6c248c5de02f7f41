"""An agent's file, and a ClickHouse to publish it to."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from agent.store import claim
from agent.store.connection import open_engine
from agent.store.migrating import upgrade


@pytest.fixture(autouse=True)
def a_silent_publisher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not give the name back."""
    monkeypatch.setattr(claim, "DEAD_AFTER_S", 0.0)


@pytest.fixture
def shared(clickhouse_url: str) -> Iterator[Engine]:
    engine = open_engine(clickhouse_url)
    upgrade(engine)
    yield engine
    engine.dispose()
