"""The column type of timestamps."""

from datetime import UTC, datetime
from math import nan
from typing import Any

from sqlalchemy import DateTime, Dialect
from sqlalchemy.types import TypeDecorator, TypeEngine


class UtcTimestamp(TypeDecorator[float]):
    """Unix seconds in the program, a UTC timestamp in the database, to the microsecond."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """ClickHouse's own type: its driver would write others in whole seconds."""
        if dialect.name != "clickhousedb":
            return dialect.type_descriptor(self.impl_instance)
        from clickhouse_connect.cc_sqlalchemy.datatypes.sqltypes import DateTime64

        return dialect.type_descriptor(DateTime64(6, "UTC"))

    def result_processor(self, dialect: Dialect, coltype: object) -> Any:
        """Reads what is no timestamp as NaN: so one damaged row does not end a query of many."""
        process = super().result_processor(dialect, coltype)
        assert process is not None, "it has process_result_value"

        def read(value: Any) -> float | None:
            try:
                found: float | None = process(value)
            except (ValueError, TypeError, AttributeError, OverflowError):
                return nan
            return found

        return read

    def process_bind_param(self, value: float | None, dialect: Dialect) -> datetime | None:
        """The timestamp as the database stores it."""
        return None if value is None else datetime.fromtimestamp(value, UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        """Unix seconds; SQLite returns UTC without a time zone."""
        if value is None:
            return None
        return float((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())
