"""Fixtures that tests in any folder may ask for."""

from tests.real_parts.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]
