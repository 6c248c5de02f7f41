"""Loads what each start of an agent would load anew: the migrations, and PostgreSQL's driver."""

# FastAPI imports it when it adds the first route.
import pydantic.v1  # noqa: F401

from agent.store.connection import open_engine
from agent.store.migrating import newest_revision

newest_revision()
open_engine("postgresql://nowhere/nothing").dispose()
