"""A comparison as text for a terminal, as Markdown for a pull request, and as JSON."""

from agent.outputs.comparison.json_text import json_text
from agent.outputs.comparison.markdown import markdown
from agent.outputs.comparison.terminal import print_comparison

__all__ = ["json_text", "markdown", "print_comparison"]
