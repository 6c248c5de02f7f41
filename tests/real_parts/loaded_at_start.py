"""Loads what each start of an agent would load anew: the migrations, and PostgreSQL's driver."""

from agent.store.connection import open_engine
from agent.store.migrating import newest_revision

newest_revision()
open_engine("postgresql://nowhere/nothing").dispose()
