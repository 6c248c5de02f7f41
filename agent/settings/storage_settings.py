"""Settings of the database."""

from typing import Literal, Self

from pydantic import Field, model_validator

from agent.settings.section import Section
from agent.settings.values import DatabaseUrl, Duration, WholeNumber


class JournalSettings(Section):
    """An agent's own SQLite file, which is forwarded to the shared database (docs/storage.md)."""

    enabled: bool = True
    """Whether an agent writes to it first. With SQLite there is none, with ClickHouse always."""
    path: str = Field(default="goodput-journal.db", min_length=1)
    """The file."""
    max_bytes: WholeNumber = Field(default=2_147_483_648, ge=1_000_000)
    """Bytes of its rows beyond which requests are refused, if all of them still wait."""
    max_age: Duration = Field(default="1d")  # type: ignore[assignment]
    """How long rows stay in it; those that still wait then are dropped and counted."""


class StorageSettings(Section):
    """The database, and the retention of its rows."""

    url: DatabaseUrl = "sqlite:///goodput.db"
    """A SQLite file, `postgresql://user:password@host/database`, or
    `clickhousedb://user:password@host:8123/database`, which always has a journal before it."""
    keep_requests: Duration = Field(default="7d")  # type: ignore[assignment]
    """How long single requests and samples stay."""
    keep_rollups: Duration = Field(default="400d")  # type: ignore[assignment]
    """How long rollups, minutes and events stay."""
    query_timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long a query of the API may take; a longer one gets 503."""
    write_timeout: Duration = Field(default="30s")  # type: ignore[assignment]
    """How long a write may take on PostgreSQL; a longer one is cancelled and sent again."""
    max_series: WholeNumber = Field(default=10_000, ge=1)
    """Series of models, tenants and lengths that figures tell apart; the rest is `other`."""
    on_corrupt: Literal["fail", "set_aside"] = "fail"
    """What is done with a SQLite file that is no database; `set_aside` renames it."""
    journal: JournalSettings = JournalSettings()

    @model_validator(mode="after")
    def _journal_before_clickhouse(self) -> Self:
        if self.url.startswith("clickhousedb:") and not self.journal.enabled:
            raise ValueError(
                "journal.enabled is false: an agent joins, books and explains requests in a "
                "database with transactions, which ClickHouse is not; leave the journal on"
            )
        return self

    @property
    def used_journal(self) -> JournalSettings | None:
        """The journal; None of SQLite, which is a file of this agent alone anyway."""
        wanted = self.journal.enabled and not self.url.startswith("sqlite")
        return self.journal if wanted else None

    @property
    def own_url(self) -> str:
        """Where this agent writes."""
        journal = self.used_journal
        return self.url if journal is None else f"sqlite:///{journal.path}"
