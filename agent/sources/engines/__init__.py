"""Reads the engines: their expositions, models and health."""
