"""Faults on the real programs, end to end."""
