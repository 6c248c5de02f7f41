"""Starts the command `goodput-agent`: its script, and `python -m agent`."""

from agent.app.supervising import kept_imports


def start() -> None:
    """Import the commands, and run the one that is asked for."""
    with kept_imports():
        from agent.cli import command
    command()


if __name__ == "__main__":
    start()
