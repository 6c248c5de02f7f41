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
    ("why", "state", "watched"),
    [
        ("it loads its model", {"ready": False}, False),
        ("it is not scheduled", {"phase": "Pending", "ready": False, "ip": None}, False),
        ("it ends on purpose", {"ending": True}, False),
        ("it has ended", {"phase": "Failed", "ready": False, "since": LATER}, False),
        ("its node is lost", {"phase": "Unknown"}, False),
        ("it was ready and hangs", {"ready": False, "since": LATER}, True),
        ("it died and starts again", {"ready": False, "restarts": 1}, True),
    ],
)
def test_a_pod_is_watched_from_ready_to_its_end(
    why: str, state: dict[str, Any], watched: bool
) -> None:
    assert (found(pod("chat-0", **state)) is not None) is watched, why


def test_a_pod_without_a_status_is_not_watched() -> None:
    given = pod("chat-0")
    del given["status"]
    assert found(given) is None
