"""The pages on alerts, where links in alerts find them."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.outputs.api.serving import Api

RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
NAMES = sorted(path.name for path in RUNBOOKS.iterdir())


def test_every_page_is_served_as_a_text_that_a_browser_shows(api: Api) -> None:
    assert "LlmEngineDown.md" in NAMES
    for name in NAMES:
        answer = api.answer(f"/runbooks/{name}")
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert answer.text == (RUNBOOKS / name).read_text(encoding="utf-8")


def test_the_ending_of_the_files_name_may_be_left_out(api: Api) -> None:
    assert api.answer("/runbooks/GpuLost").text.startswith("# GpuLost\n")


@pytest.mark.parametrize("name", ["LlmNothing", "LlmNothing.md", "gpulost.md", "a/b", ""])
def test_what_is_no_page_is_refused_with_a_sentence(api: Api, name: str) -> None:
    answer = api.answer(f"/runbooks/{name}")
    assert answer.status_code == 404
    told = f"there is no runbook {name!r}; see /runbooks/README.md"
    assert answer.json() == {"detail": told}


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
def test_no_path_leads_to_anything_else(api: Api, path: str) -> None:
    # On a bare socket: clients tidy a path up before they ask.
    address = urlsplit(api.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 30) as asking:
        asking.sendall(f"GET /runbooks/{path} HTTP/1.0\r\n\r\n".encode())
        answer = b"".join(iter(lambda: asking.recv(65536), b""))
    assert answer.split(b" ")[1] == b"404", answer
    assert b"there is no runbook" in answer
