"""The starts of engines over HTTP, each beside the one before of the same engine."""

from typing import Any

import pytest

from agent.records.event import Confidence, Event, EventKind
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON


def started(after_s: float, *, engine: str = "chat-0", **evidence: Any) -> Event:
    return Event(
        at=NOON + after_s,
        engine=engine,
        kind=EventKind.STARTED,
        confidence=Confidence.CERTAIN,
        evidence=evidence,
    )


def starts(api: Api, **filters: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = api.query("starts", **filters)["items"]
    return items


def test_a_start_has_its_phases_in_their_order(api: Api) -> None:
    whole: dict[str, Any] = {"weights_s": 20.0, "boot_s": 10.0, "compile_s": 25.0, "front_s": 5.0}
    api.store_events(
        started(0, began_at=NOON - 60.0, start_s=60.0, first_request_s=64.5, **whole),
        Event(at=NOON, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN),
    )
    (item,) = starts(api)
    assert (unix(item["began_at"]), unix(item["ready_at"])) == (NOON - 60, NOON)
    assert (item["agent"], item["engine"]) == ("agent-0", "chat-0")
    assert (item["start_s"], item["first_request_s"]) == (60, 64.5)
    phases = [("boot", 10), ("weights", 20), ("compile", 25), ("front", 5)]
    assert list(item["phases"].items()) == phases
    assert (item["change_s"], item["phase_changes"]) == (None, {})


def test_two_starts_are_compared_phase_by_phase(api: Api) -> None:
    api.store_events(
        started(0, start_s=60.0, weights_s=20.0, front_s=40.0),
        started(100, start_s=150.0, weights_s=21.0, front_s=40.0, compile_s=89.0),
        started(50, engine="chat-1", start_s=9.0),
    )
    newest, other, oldest = starts(api)
    assert newest["change_s"] == 90
    assert newest["phase_changes"] == {"weights": 1, "compile": 89, "front": 0}
    assert (other["change_s"], oldest["change_s"]) == (None, None)


def test_a_start_of_unknown_length_has_no_change(api: Api) -> None:
    api.store_events(started(0), started(100, start_s=150.0, weights_s=3.0))
    newest, oldest = starts(api)
    assert (newest["change_s"], newest["phase_changes"]) == (None, {})
    assert (oldest["start_s"], oldest["first_request_s"], oldest["phases"]) == (None, None, {})


@pytest.mark.parametrize(
    ("filters", "found"),
    [
        ({"engine": "chat-1"}, 1),
        ({"agent": "agent-1"}, 0),
        ({"limit": "1"}, 1),
        ({"window": "1m"}, 0),
    ],
)
def test_starts_are_found_by_each_filter(api: Api, filters: dict[str, str], found: int) -> None:
    api.store_events(started(0, start_s=1.0), started(1, engine="chat-1", start_s=1.0))
    assert len(starts(api, **filters)) == found
