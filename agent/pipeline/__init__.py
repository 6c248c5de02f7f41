"""Judges, stores and counts what the sources read."""
