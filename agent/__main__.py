"""Runs the command `goodput-agent` as `python -m agent`."""

from agent.cli import command

command()
