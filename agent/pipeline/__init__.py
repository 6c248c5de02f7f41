"""The verbs: what happens to what the sources saw."""
