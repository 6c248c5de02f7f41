"""Health, the metrics page, the API's own documentation, and a database that is away."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from fastapi.openapi.models import OpenAPI

from tests.outputs.api.serving import Api, open_api

QUESTIONS = (
    *("summary", "timeseries", "requests", "requests/{request_id}", "events", "objectives"),
    *("breakdown", "gpus", "gpus/{gpu}"),
)


# What is read as it is, and no JSON.
TEXTS = ("/metrics", "/runbooks/{name}")


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Api]:
    """An API whose database has no tables."""
    with open_api(tmp_path, migrated=False) as opened:
        yield opened


@pytest.mark.parametrize("path", QUESTIONS)
def test_a_database_that_is_away_is_told_as_such(away: Api, path: str) -> None:
    answer = away.answer(f"/api/v1/{path}")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["detail"].startswith("the database does not answer")
    assert "SELECT" not in answer.text


def test_the_process_is_alive_without_its_database(away: Api) -> None:
    assert away.answer("/healthz").json() == {"status": "ok", "problems": []}


def test_ready_is_what_has_no_problem(api: Api) -> None:
    ready = api.answer("/readyz")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "problems": []})
    api.around.problems.append("the database does not answer")
    answer = api.answer("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "problems": ["the database does not answer"]}
    api.around.problems.clear()
    assert api.answer("/readyz").status_code == 200


def test_the_process_is_alive_while_every_thread_waits_for_the_database(api: Api) -> None:
    go = threading.Event()
    waiting = threading.Semaphore(0)

    class Stuck(list[str]):
        def __iter__(self) -> Iterator[str]:
            waiting.release()
            go.wait(120)
            return super().__iter__()

    api.around.problems = Stuck()
    # As many as the framework has threads for.
    asking = [threading.Thread(target=_ready, args=(api.url,)) for _ in range(60)]
    for thread in asking:
        thread.start()
    for _ in range(40):
        assert waiting.acquire(timeout=30)
    try:
        assert requests.get(f"{api.url}/healthz", timeout=10).status_code == 200
    finally:
        go.set()
        for thread in asking:
            thread.join()


def _ready(url: str) -> None:
    requests.get(f"{url}/readyz", timeout=180)


def test_the_metrics_page_is_in_the_format_asked_for(api: Api) -> None:
    api_answer = api._session.get(f"{api.url}/metrics", headers={"Accept": "text/x"}, timeout=30)
    assert api_answer.text == "# asked for text/x"
    assert api_answer.headers["Content-Type"] == "text/plain; version=0.0.4"


def test_the_first_page_and_the_documentation_are_served(api: Api) -> None:
    for path in ("/", "/docs"):
        answer = api.answer(path)
        assert answer.status_code == 200
        assert answer.headers["Content-Type"].startswith("text/html")


def test_what_does_not_exist_is_not_found(api: Api) -> None:
    for path in ("/nothing", "/api/v1", "/api/v1/nothing", "/api/v2/summary"):
        assert api.answer(path).status_code == 404


# The document


@pytest.fixture(scope="module")
def document(busy: Api) -> dict[str, Any]:
    told: dict[str, Any] = busy.answer("/openapi.json").json()
    return told


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        assert list(methods) == ["get"], f"{path} is no question"
        yield path, methods["get"]


def test_the_document_is_openapi_and_names_the_version(document: dict[str, Any]) -> None:
    OpenAPI.model_validate(document)
    assert document["openapi"].startswith("3.")
    assert document["info"]["version"] == "1.2.3"
    assert {f"/api/v1/{path}" for path in QUESTIONS} <= document["paths"].keys()


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    referred = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referred == schemas.keys()


def test_every_route_has_a_typed_answer(document: dict[str, Any]) -> None:
    for path, operation in operations(document):
        for media_type, content in operation["responses"]["200"]["content"].items():
            schema = content["schema"]
            assert schema, (path, media_type)
            assert ("$ref" in schema) == (path not in TEXTS), (path, media_type)
        assert operation["description"], path


def test_every_question_documents_its_refusals_as_they_come(document: dict[str, Any]) -> None:
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/ProblemResponse"}}}
    for path, operation in operations(document):
        if path.startswith("/api/"):
            assert operation["responses"]["422"]["content"] == problem, path
            assert operation["responses"]["503"]["content"] == problem, path
    for path in ("requests/{request_id}", "gpus/{gpu}"):
        responses = document["paths"][f"/api/v1/{path}"]["get"]["responses"]
        assert responses["404"]["content"] == problem, path


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("summary", {"window", "engine", "model", "tenant", "objective"}),
        (
            "breakdown",
            {
                *("by", "window", "limit", "engine", "model", "tenant", "objective"),
                *("cost", "histograms"),
            },
        ),
        ("timeseries", {"window", "step", "engine", "model", "tenant", "objective"}),
        ("events", {"engine", "gpu", "kind", "confidence", "limit", "cursor"}),
        ("gpus", set()),
        ("gpus/{gpu}", {"window", "limit", "cursor"}),
        ("objectives", {"window"}),
        (
            "requests",
            {
                *("engine", "model", "tenant", "objective", "verdict", "status", "started_from"),
                *("started_until", "min_ttft_s", "min_tpot_s", "min_e2e_s", "limit", "cursor"),
            },
        ),
    ],
)
def test_the_parameters_are_those_that_others_rely_on(
    document: dict[str, Any], path: str, parameters: set[str]
) -> None:
    all_told = document["paths"][f"/api/v1/{path}"]["get"].get("parameters", [])
    told = [parameter for parameter in all_told if parameter["in"] == "query"]
    assert {parameter["name"] for parameter in told} == parameters
    assert not any(parameter["required"] for parameter in told)
