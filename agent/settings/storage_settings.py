"""Settings of the database."""

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import DatabaseUrl, Duration, WholeNumber


class StorageSettings(Section):
    """The database, and the retention of its rows.

    A query of the API may take `query_timeout`. Figures tell `max_series` series of models, tenants
    and lengths apart: docs/rollups.md.
    """

    url: DatabaseUrl = "sqlite:///goodput.db"
    keep_requests: Duration = Field(default="7d")  # type: ignore[assignment]
    keep_rollups: Duration = Field(default="400d")  # type: ignore[assignment]
    query_timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    max_series: WholeNumber = Field(default=10_000, ge=1)
