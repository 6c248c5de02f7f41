"""Which sockets of plugins the settings lead to. `tests/test_app_plugin_found.py` uses them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.app import plugins
from agent.app.plugins import plugin_sockets
from agent.settings import Settings
from agent.sources.plugin_sockets import PluginSocket

LOCAL, OTHER_PORT, REMOTE = "http://127.0.0.1:8000", "http://127.0.0.1:8001", "http://10.9.8.7:8000"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where plugins look for the agent."""
    found = tmp_path / "vllm.sock"
    monkeypatch.setattr(plugins, "default_places", lambda: (found,))
    return found


def sockets(*engines: dict[str, Any], **settings: Any) -> Sequence[PluginSocket]:
    named = [{"name": f"chat-{number}", **engine} for number, engine in enumerate(engines)]
    return plugin_sockets(Settings.model_validate({"engines": named, **settings}))


def opened_at(found: PluginSocket) -> Path | None:
    try:
        found.open()
        return found.path
    finally:
        found.close()


@pytest.mark.parametrize(
    ("engines", "listens"),
    [
        ([], False),
        ([{"url": REMOTE}], False),
        ([{"url": LOCAL, "same_machine": False}], False),
        ([{"url": REMOTE, "same_machine": True}], True),
        ([{"url": LOCAL}], True),
        ([{"url": LOCAL}, {"url": REMOTE}], True),
        # The port does not say which one a process is of.
        ([{"url": LOCAL}, {"url": "http://127.0.0.2:8000"}], False),
        ([{"url": LOCAL}, {"url": "http://127.0.0.2:8000"}, {"url": OTHER_PORT}], True),
    ],
)
def test_the_shared_socket_is_for_engines_of_this_machine(
    place: Path, engines: list[dict[str, Any]], listens: bool
) -> None:
    found = sockets(*engines)
    assert [each.engine for each in found] == [None] * listens
    assert [opened_at(each) for each in found] == [place] * listens
    assert sockets(*engines, agent_socket="none") == []


def test_its_place_can_be_given(tmp_path: Path) -> None:
    (found,) = sockets({"url": LOCAL}, agent_socket=str(tmp_path / "given.sock"))
    assert opened_at(found) == tmp_path / "given.sock"


def test_an_engine_with_a_socket_of_its_own_needs_no_shared_one(tmp_path: Path) -> None:
    own = {"plugin_socket": str(tmp_path / "own.sock")}
    assert [each.engine for each in sockets({"url": LOCAL, **own})] == ["chat-0"]
    both = sockets({"url": LOCAL, **own}, {"url": OTHER_PORT})
    assert [each.engine for each in both] == ["chat-0", None]
    assert both[0].senders is None


def test_a_socket_of_an_engine_in_the_shared_place_is_both(place: Path) -> None:
    """The plugins of other engines find it there: their records must not be of this engine."""
    (found,) = sockets({"url": LOCAL, "plugin_socket": str(place)}, {"url": OTHER_PORT})
    assert found.engine == "chat-0"
    assert found.senders is not None
