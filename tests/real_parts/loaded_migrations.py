"""Loads the migrations, which each start of an agent compiles anew."""

from agent.store.migrating import newest_revision

newest_revision()
