"""Runbooks at the URLs that alerts link to."""

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.outputs.api.serving import Api

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
