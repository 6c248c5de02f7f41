"""Measures proxied requests while their responses pass."""
