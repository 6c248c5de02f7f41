"""A process that stands in for an engine: a front that listens, and a core that obeys it.

`python standin_engine.py CORE`, where CORE is a Python under the name that the core shall have,
prints the port and the PID of the core. Then a line on its input makes the core take memory.
"""

import socket
import subprocess
import sys

CORE = """
import sys
print("begun", flush=True)
sys.stdin.readline()
taken = []
while True:
    taken.append(bytearray(4 << 20))
"""


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    core = subprocess.Popen(
        ["VLLM::EngineCore", "-I", "-S", "-c", CORE],
        executable=sys.argv[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert core.stdin is not None
    assert core.stdout is not None
    # Before that, the kernel may not yet have the name of what it executes.
    core.stdout.readline()
    _say(f"{listening.getsockname()[1]} {core.pid}")
    for _ in sys.stdin:
        core.stdin.write(b"eat\n")
        core.stdin.flush()
        core.wait()
        _say(f"lost {core.returncode}")


if __name__ == "__main__":
    main()
