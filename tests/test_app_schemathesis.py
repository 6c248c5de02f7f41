"""schemathesis queries every operation of the stored API by its OpenAPI document, in this process.

It makes queries that the document allows, and ones that it forbids. No response may be a 500, have
a status, a type or a body that the document lacks, or accept what the document forbids.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from agent.app.serving import stored_context
from agent.outputs.api.routes import live_figures, make_api
from agent.records.event import Confidence, Event, EventKind
from agent.settings import Settings
from agent.store.connection import open_engine
from tests.outputs.api.serving import Api, ServedAgent
from tests.outputs.api.test_causes import CHAT, EXPLAINED, SLOW
from tests.outputs.api.test_list_routes import sample
from tests.outputs.api.traffic import NOW, OBJECTIVES, mixed
from tests.records.making import MIG_INSTANCE
from tests.records.minutes import minute
from tests.store.migrated import migrated_file

pytestmark = pytest.mark.slow

# It answers until its client leaves.
STREAMS = "/api/v1/live"
EXAMPLES = 5
# Queries at least, of all operations: that many are made at this number of examples.
LEAST_QUERIES = 100

# The same examples each time: a test that fails must fail again.
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The document of the API over a small database with rows of every kind."""
    file = tmp_path_factory.mktemp("stored") / "goodput.db"
    file.write_bytes(migrated_file())
    engine = open_engine(f"sqlite:///{file}")
    fill(Api("", engine, engine, ServedAgent(now=NOW)))
    context = replace(stored_context(engine, Settings()), now=lambda: NOW)
    yield schemathesis.openapi.from_asgi("/openapi.json", make_api(context, live_figures(context)))
    engine.dispose()


def fill(api: Api) -> None:
    """Store some rows of every kind."""
    api.store([item.judged.record for item in EXPLAINED], [CHAT, SLOW])
    api.explain(*EXPLAINED)
    api.store(mixed(100)[len(EXPLAINED) + 1 :], OBJECTIVES)
    api.store_minutes(minute(0), minute(2))
    api.store_gpus(sample(NOW - 3, mig_instances=(MIG_INSTANCE,)))
    api.store_events(
        Event(at=NOW - 5, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)
    )
    api.set_objectives([CHAT])
    api.beat("agent-0")


def queries_of(operation: Any, mode: GenerationMode) -> int:
    """Make bounded queries of an operation, and check each response; returns how many."""
    made = 0

    @bounded
    @given(case=operation.as_strategy(generation_mode=mode))
    def query(case: Any) -> None:
        nonlocal made
        made += 1
        # A window that is too long, or a cursor that no page gave out, is written as it should be.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    # An operation without parameters can be asked for nothing that its document forbids.
    try:
        query()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE
    return made


def test_every_operation_responds_as_its_document_says(schema: Any) -> None:
    operations = [found.ok() for found in schema.exclude(path=STREAMS).get_all_operations()]
    made = sum(queries_of(operation, mode) for operation in operations for mode in GenerationMode)
    assert made > LEAST_QUERIES
