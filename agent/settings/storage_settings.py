"""Settings of the database."""

from typing import Literal

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import DatabaseUrl, Duration, WholeNumber


class StorageSettings(Section):
    """The database, and the retention of its rows.

    A query of the API may take `query_timeout`. Figures tell `max_series` series of models, tenants
    and lengths apart: docs/rollups.md. `on_corrupt` is what happens with a SQLite file that is no
    database: `set_aside` renames it and begins a new one.
    """

    url: DatabaseUrl = "sqlite:///goodput.db"
    keep_requests: Duration = Field(default="7d")  # type: ignore[assignment]
    keep_rollups: Duration = Field(default="400d")  # type: ignore[assignment]
    query_timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    max_series: WholeNumber = Field(default=10_000, ge=1)
    on_corrupt: Literal["fail", "set_aside"] = "fail"
