"""The files of the page: nothing from elsewhere, nothing that runs text as code."""

import hashlib
import re
from pathlib import Path

import pytest

from agent.outputs.web import ASSETS_PATH, first_page
from tests.outputs.api.serving import open_api

SCRIPTS = sorted(ASSETS_PATH.glob("*.js"))
VENDOR = ASSETS_PATH / "vendor"
ROUTES = re.compile(r'query\(["`](\w+)["`/]?')


def test_the_page_loads_only_files_of_this_agent_and_asks_routes_that_exist(
    tmp_path: Path,
) -> None:
    page = first_page(simulated=True)
    assert "SIMULATED: " in page
    assert "SIMULATED" not in first_page(simulated=False)
    assert not re.search(r"<script>|<style|\son\w+=|style=", page)
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    routes = {route for script in SCRIPTS for route in ROUTES.findall(script.read_text())}
    assert min(len(files), len(routes)) > 4
    with open_api(tmp_path) as api:
        for path in (*files, *(f"/api/v1/{route}" for route in routes)):
            assert path.startswith("/")
            # A route that exists may lack its parameters.
            assert api.get(path).status_code in (200, 422), path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_runs_no_text_and_asks_nobody_else(script: Path) -> None:
    text = script.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|new Function|\.write\(", text
    )
    assert not re.search(r"https?://|dangerouslySetInnerHTML", text)
    for imported in re.findall(r'from "([^"]+)"', text):
        assert (ASSETS_PATH / imported).is_file(), imported


def test_scripts_of_others_are_those_that_are_listed() -> None:
    """As `.ci/vendor-page` copied them out of their packages."""
    listed = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, listed)}
    assert {path.name for path in VENDOR.iterdir()} == {*sums, "SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == digest, name
