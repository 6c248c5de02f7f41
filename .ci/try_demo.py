"""Runs `PROGRAM demo` in an empty folder until it has stored requests, and stops it.

Usage: try_demo.py PROGRAM. It needs the standard library alone.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

WITHIN_S = 180.0
REQUESTS = 5


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def stored(url: str) -> int:
    """How many requests the agent has stored; 0 while it does not answer."""
    try:
        with urlopen(f"{url}/api/v1/summary?window=5m", timeout=5) as response:
            summary = json.load(response)
    except OSError:
        return 0
    assert summary["simulated"] is True, "the demo says that it is simulated"
    return int(summary["requests"])


def try_demo(program: str, folder: Path) -> None:
    """Raise SystemExit with the log unless the demo stores requests and stops in order."""
    port = free_port()
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "GOODPUT_LISTEN__PORT": str(port),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{free_port()}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{free_port()}",
    }
    log = folder / "log"
    with log.open("wb") as output:
        demo = subprocess.Popen([program, "demo"], cwd=folder, env=environment, stderr=output)
        until = time.monotonic() + WITHIN_S
        while demo.poll() is None and time.monotonic() < until:
            if stored(f"http://127.0.0.1:{port}") >= REQUESTS:
                break
            time.sleep(0.5)
        works = demo.poll() is None and time.monotonic() < until
        demo.terminate()
        status = demo.wait(60)
    if not works or status != 0:
        raise SystemExit(f"the demo does not work (exit code {status}):\n{log.read_text()}")
    sys.stdout.write(f"the demo stored {REQUESTS} requests and more, and stopped\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try_demo(sys.argv[1], Path(folder))
