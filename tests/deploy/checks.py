"""What schema checkers say of a file, and what holds for every file that deploys something."""

import re
import subprocess
import sys
from pathlib import Path

_TOOLS = Path(sys.executable).parent

# A name and a version: `latest`, a bare name or a bare major version would move under our feet.
PINNED = re.compile(r"[a-z0-9][a-z0-9./-]*:v?\d+\.\d+(\.\d+)?(-[a-z0-9.-]+)?")


def complaints(*command: str | Path) -> str:
    """What a tool beside this Python says against a file; empty when it is content."""
    told = subprocess.run(
        [_TOOLS / command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    return "" if told.returncode == 0 else told.stdout + told.stderr
