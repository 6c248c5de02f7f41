"""Queries of the API on many requests, which a benchmark made inside the database."""

from collections.abc import Iterator

from tests.outputs.api.serving import Api

# Requests in each second of the time that the rows cover.
PER_S = 1000


def queries(api: Api) -> Iterator[tuple[str, str]]:
    """What is asked for, and the path of the query."""
    yield "the newest 100", "requests?limit=100"
    yield "the newest 100 slow ones of a model", "requests?limit=100&model=model-1&min_ttft_s=1"
    newest = api.query("requests", limit=1)["items"][0]["request_id"]
    yield "one by its id", f"requests/{newest}"
    yield "a minute by user", "breakdown?by=user&window=1m"
    yield "verdicts by length of an hour", "lengths?window=1h"
    yield "the worst 100 by TTFT of all", "requests?worst=ttft&limit=100"


def bytes_of(api: Api, path: str) -> int:
    """Ask once; returns the bytes of the response."""
    response = api.get(f"/api/v1/{path}")
    assert response.status_code == 200, response.text
    return len(response.content)
