"""Starts the command `goodput-agent`: its script, and `python -m agent`."""

import gc


def start() -> None:
    """Import the commands, and run the one that is asked for.

    Nothing that imports make is garbage: searching it was a fifth of a start. Left out of later
    searches, it stays in the memory that the workers of the proxy share.
    """
    gc.disable()
    from agent.cli import command

    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    start()
