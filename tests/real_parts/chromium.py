"""Headless Chromium from Debian: pages as a user sees them."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.real_parts.processes import PartMissing

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
# Virtual time runs as fast as the page allows and stands still while it waits for the network.
SCRIPTS_RUN_MS = 3000
FINISH_WITHIN_S = 120.0


def dump_dom(url: str) -> str:
    """The document after its scripts ran, as HTML."""
    return _run(url, "--dump-dom")


def screenshot(url: str, picture: Path, *, width: int = 1280, height: int = 900) -> None:
    """Write a PNG of a window of this size."""
    _run(url, f"--screenshot={picture}", f"--window-size={width},{height}")


def _run(url: str, *wanted: str) -> str:
    browser = shutil.which("chromium")
    if browser is None:
        raise PartMissing("chromium is not installed: run .ci/install-parts")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        finished = subprocess.run(
            [
                browser,
                *FLAGS,
                f"--user-data-dir={home}/profile",
                f"--virtual-time-budget={SCRIPTS_RUN_MS}",
                *wanted,
                url,
            ],
            env={**os.environ, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
            timeout=FINISH_WITHIN_S,
        )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
