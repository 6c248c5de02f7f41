"""Which pods have an engine to watch, and where it answers."""

from typing import Any

import pytest

from agent.sources.kubernetes.pod_watch import FoundEngine, engine_of
from tests.sources.kubernetes.fake_api_server import LATER, pod


def found(given: dict[str, Any], port: int | str = 8000) -> FoundEngine | None:
    return engine_of(given, port, with_namespace=False)


def test_an_engine_has_the_name_and_the_address_of_its_pod() -> None:
    assert found(pod("chat-0")) == ("chat-0", "http://10.0.0.1:8000")
    assert engine_of(pod("chat-0"), 8000, with_namespace=True) == (
        "llm/chat-0",
        "http://10.0.0.1:8000",
    )
    assert found(pod("chat-0", ip="fd00::1")) == ("chat-0", "http://[fd00::1]:8000")


def test_a_port_may_be_named_by_any_container() -> None:
    assert found(pod("chat-0"), "http") == ("chat-0", "http://10.0.0.1:8001")
    assert found(pod("chat-0"), "metrics") is None


@pytest.mark.parametrize(
    ("why", "state"),
    [
        ("it loads its model", {"ready": False}),
        ("it is not scheduled", {"phase": "Pending", "ready": False, "ip": None}),
        ("it ends on purpose", {"ending": True}),
        ("it has ended", {"phase": "Failed", "ready": False, "since": LATER}),
        ("its node is lost", {"phase": "Unknown"}),
    ],
)
def test_a_pod_is_not_watched_while(why: str, state: dict[str, Any]) -> None:
    assert found(pod("chat-0", **state)) is None, why


@pytest.mark.parametrize(
    ("why", "state"),
    [
        ("it hangs", {"ready": False, "since": LATER}),
        ("it died and starts again", {"ready": False, "restarts": 1}),
    ],
)
def test_a_pod_that_was_ready_stays_watched_when(why: str, state: dict[str, Any]) -> None:
    assert found(pod("chat-0", **state)) is not None, why


def test_a_pod_without_a_status_is_not_watched() -> None:
    given = pod("chat-0")
    del given["status"]
    assert found(given) is None
