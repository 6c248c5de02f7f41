"""Schema checkers, and the pattern of a pinned image, for every deployment file."""

import re
import subprocess
import sys
from pathlib import Path

_TOOLS = Path(sys.executable).parent

# A name and a version: `latest`, a bare name or a bare major version would change later.
PINNED = re.compile(r"[a-z0-9][a-z0-9./-]*:v?\d+\.\d+(\.\d+)?(-[a-z0-9.-]+)?")


def complaints(*command: str | Path) -> str:
    """Complaints of a tool beside this Python about a file; empty when it accepts the file."""
    finished = subprocess.run(
        [_TOOLS / command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr
