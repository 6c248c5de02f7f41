"""`python -m agent` is `goodput-agent`."""

from agent.cli import command

command()
