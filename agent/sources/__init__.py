"""Everything that the agent reads or receives."""
