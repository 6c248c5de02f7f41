"""Health, the exposition, the OpenAPI document, and a database without tables."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from fastapi.openapi.models import OpenAPI

from tests.outputs.api.serving import Api, open_api

QUERIES = (
    *("summary", "timeseries", "requests", "requests/{request_id}", "events", "objectives"),
    *("breakdown", "gpus", "gpus/{gpu}", "efficiency", "lengths"),
)


# Routes that return plain text and no JSON.
TEXTS = ("/metrics", "/runbooks/{name}")


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Api]:
    """An API whose database has no tables."""
    with open_api(tmp_path, migrated=False) as opened:
        yield opened


@pytest.mark.parametrize("path", QUERIES)
def test_a_database_failure_is_a_503(broken: Api, path: str) -> None:
    response = broken.get(f"/api/v1/{path}")
    assert response.status_code == 503
    assert response.headers["Retry-After"] == "1"
    assert response.json()["detail"].startswith("the database does not answer")
    assert "SELECT" not in response.text


def test_the_process_is_alive_without_its_database(broken: Api) -> None:
    assert broken.get("/healthz").json() == {"status": "ok", "problems": []}


def test_an_agent_without_problems_is_ready(api: Api) -> None:
    ready, parts = api.get("/readyz"), {"store": "ok"}
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "problems": [], "parts": parts}
    api.agent.problems.append("the database does not answer")
    response = api.get("/readyz")
    assert response.status_code == 503
    problems = ["the database does not answer"]
    assert response.json() == {"status": "not ready", "problems": problems, "parts": parts}
    api.agent.problems.clear()
    assert api.get("/readyz").status_code == 200


def test_an_exposition_that_cannot_be_made_is_named_until_it_can(api: Api) -> None:
    usual = api.agent.metrics

    def broken(_accept: str) -> tuple[bytes, str]:
        raise ValueError("no number: x")

    api.agent.metrics = broken
    assert api.get("/metrics").status_code == 500
    ready = api.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["parts"]["metrics"] == "/metrics fails: ValueError: no number: x"
    api.agent.metrics = usual
    assert api.get("/metrics").status_code == 200
    assert "metrics" not in api.get("/readyz").json()["parts"]


def test_the_process_is_alive_while_every_thread_waits_for_the_database(api: Api) -> None:
    go = threading.Event()
    waiting = threading.Semaphore(0)

    class Stuck(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            waiting.release()
            go.wait(120)
            return super().__iter__()

    api.agent.engines = Stuck()
    # More than the framework has threads.
    clients = [threading.Thread(target=_ask_engines, args=(api.url,)) for _ in range(60)]
    for thread in clients:
        thread.start()
    for _ in range(40):
        assert waiting.acquire(timeout=30)
    try:
        for path in ("/healthz", "/readyz"):
            assert requests.get(f"{api.url}{path}", timeout=10).status_code == 200
    finally:
        go.set()
        for thread in clients:
            thread.join()


def _ask_engines(url: str) -> None:
    requests.get(f"{url}/api/v1/engines", timeout=180)


def test_the_exposition_has_the_accepted_format(api: Api) -> None:
    api_response = requests.get(f"{api.url}/metrics", headers={"Accept": "text/x"}, timeout=30)
    assert api_response.text == "# asked for text/x"
    assert api_response.headers["Content-Type"] == "text/plain; version=0.0.4"


def test_unknown_paths_are_not_found(api: Api) -> None:
    for path in ("/nothing", "/api/v1", "/api/v1/nothing", "/api/v2/summary"):
        assert api.get(path).status_code == 404


# The document


@pytest.fixture(scope="module")
def document(busy: Api) -> dict[str, Any]:
    body: dict[str, Any] = busy.get("/openapi.json").json()
    return body


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        assert list(methods) == ["get"], f"{path} is no query"
        yield path, methods["get"]


def test_the_document_is_valid_openapi_with_our_version(document: dict[str, Any]) -> None:
    OpenAPI.model_validate(document)
    assert document["openapi"].startswith("3.")
    assert document["info"]["version"] == "1.2.3"
    assert {f"/api/v1/{path}" for path in QUERIES} <= document["paths"].keys()


def test_every_route_has_a_typed_response(document: dict[str, Any]) -> None:
    for path, operation in operations(document):
        for media_type, content in operation["responses"]["200"]["content"].items():
            schema = content["schema"]
            assert schema, (path, media_type)
            assert ("$ref" in schema) == (path not in TEXTS), (path, media_type)
        assert operation["description"], path


def test_every_query_documents_its_refusals(document: dict[str, Any]) -> None:
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/ProblemResponse"}}}
    for path, operation in operations(document):
        if path.startswith("/api/"):
            assert operation["responses"]["422"]["content"] == problem, path
            assert operation["responses"]["503"]["content"] == problem, path
    for path in ("requests/{request_id}", "gpus/{gpu}"):
        responses = document["paths"][f"/api/v1/{path}"]["get"]["responses"]
        assert responses["404"]["content"] == problem, path


RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
NAMES = sorted(path.name for path in RUNBOOKS.iterdir())


def test_every_runbook_is_served_as_plain_text(busy: Api) -> None:
    assert "LlmEngineDown.md" in NAMES
    for name in NAMES:
        response = busy.get(f"/runbooks/{name}")
        assert response.status_code == 200
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert response.text == (RUNBOOKS / name).read_text(encoding="utf-8")


def test_the_file_name_extension_may_be_omitted(busy: Api) -> None:
    assert busy.get("/runbooks/GpuLost").text.startswith("# GpuLost\n")


@pytest.mark.parametrize("name", ["LlmNothing", "LlmNothing.md", "gpulost.md", "a/b", ""])
def test_an_unknown_runbook_is_refused_with_a_sentence(busy: Api, name: str) -> None:
    response = busy.get(f"/runbooks/{name}")
    assert response.status_code == 404
    sentence = f"there is no runbook {name!r}; see /runbooks/README.md"
    assert response.json() == {"detail": sentence}


@pytest.mark.parametrize(
    "path",
    [
        "../deploy.md",
        "..%2Fdeploy.md",
        "%2e%2e%2fdeploy",
        "../../../../../../../../etc/passwd",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "..\\deploy.md",
        "GpuLost.md%00",
        "./GpuLost.md",
    ],
)
def test_no_path_leads_out_of_the_folder(busy: Api, path: str) -> None:
    # On a plain socket: HTTP clients normalise the path.
    address = urlsplit(busy.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 30) as client:
        client.sendall(f"GET /runbooks/{path} HTTP/1.0\r\n\r\n".encode())
        response = b"".join(iter(lambda: client.recv(65536), b""))
    assert response.split(b" ")[1] == b"404", response
    assert b"there is no runbook" in response
