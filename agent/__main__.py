"""Starts the command `goodput-agent`: its script, and `python -m agent`."""

import os

from agent.app.supervising import kept_imports

# Threads of numpy, one for each processor, would take the engine's processors to wait for each
# other. OpenBLAS reads this when numpy is imported.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")


def start() -> None:
    """Import the commands, and run the one that is asked for."""
    os.environ.setdefault(*_ONE_THREAD)
    with kept_imports():
        from agent.cli import command
    command()


if __name__ == "__main__":
    start()
