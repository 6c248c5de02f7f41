"""Fixtures that tests in any folder may ask for."""

from hypothesis import settings

from tests.real_parts.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

# Other work on the machine must not fail a property.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
