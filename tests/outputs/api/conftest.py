"""A shared API with two hours of traffic for tests that read; an empty API for tests that write."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api, open_api, open_api_at
from tests.outputs.api.traffic import NOW, OBJECTIVES, mixed
from tests.store.emptied_postgres import emptied_postgres_url, one_postgres_url

__all__ = ["emptied_postgres_url", "one_postgres_url"]


@pytest.fixture(scope="package")
def records() -> list[RequestRecord]:
    return mixed()


@pytest.fixture(scope="package")
def busy(tmp_path_factory: pytest.TempPathFactory, records: list[RequestRecord]) -> Iterator[Api]:
    """An API with two hours of traffic and a fixed clock."""
    with open_api(tmp_path_factory.mktemp("busy")) as api:
        api.agent.now = NOW
        api.store(records, OBJECTIVES)
        yield api


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with open_api(tmp_path) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def api_of_each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Api]:
    """An API over an empty database of each kind."""
    if request.param == "sqlite":
        with open_api(tmp_path) as opened:
            yield opened
    else:
        with open_api_at(request.getfixturevalue("emptied_postgres_url")) as opened:
            yield opened
