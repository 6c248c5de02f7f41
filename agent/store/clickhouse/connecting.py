"""Connections to ClickHouse: SQLAlchemy's for queries, the driver's own client for inserts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine

from agent.errors import SettingsInvalid
from agent.store.connection import store_unavailable

CLICKHOUSE = "clickhousedb"

_CONNECT_S = 5
# After the limit of a statement and this time, the client gives up: the server is frozen.
_RESPONSE_LATER_S = 5.0

# With these, SQL means the same as on the other databases: replaced rows are not seen, a sum over
# no rows is null, and a name in a condition is a column, not an alias.
_SETTINGS: Mapping[str, Any] = {
    "final": 1,
    "do_not_merge_across_partitions_select_final": 1,
    "aggregate_functions_null_for_empty": 1,
    "cast_keep_nullable": 1,
    "join_use_nulls": 1,
    "prefer_column_name_to_alias": 1,
}
_OF_CONNECTIONS = ("ca_cert", "client_cert", "client_cert_key", "http_proxy", "https_proxy")
_MISSING = "the driver of ClickHouse is not installed; run `pip install goodput-agent[clickhouse]`"

_OF_INSERTS: Mapping[str, Any] = {
    # Each insert would wait until the server has collected others.
    "async_insert": 0,
    # A sender with a wrong clock sends requests of many months, each in its own partition.
    "max_partitions_per_insert_block": 0,
}

# ClickHouse, src/Common/ErrorCodes.cpp: the errors that a value in a row causes.
_CONTENT_CODES = frozenset((6, 26, 27, 38, 41, 53, 69, 70, 72, 117, 131, 321, 349, 407, 469))


def open_clickhouse(url: URL, *, statement_s: float, **pool: Any) -> Engine:
    """An engine; the server ends each statement after `statement_s`.

    It connects when it is used for the first time. Options in the URL win. Raises SettingsInvalid
    where the driver is not installed.
    """
    try:
        import clickhouse_connect  # noqa: F401
    except ImportError as error:
        raise SettingsInvalid([_MISSING]) from error
    connect = {
        "connect_timeout": _CONNECT_S,
        "send_receive_timeout": statement_s + _RESPONSE_LATER_S,
        "query_retries": 0,
        # No session: threads use a connection one after the other.
        "autogenerate_session_id": False,
    }
    connect["pool_mgr"] = _pool_manager(url)
    settings = {**_SETTINGS, "max_execution_time": statement_s}
    connect = {name: value for name, value in connect.items() if name not in url.query}
    options = {"pool_size": 8, **pool}
    engine = create_engine(url, connect_args={**connect, **settings}, **options)
    # ClickHouse divides integers into fractions, so SQLAlchemy must round `//` down itself.
    engine.dialect.div_is_floordiv = False
    return engine


def _pool_manager(url: URL) -> Any:
    """Connections by the options of the URL, without redirects.

    The driver's own take a proxy of the environment, and follow a redirect with the rows.
    """
    from clickhouse_connect.driver.common import coerce_bool
    from clickhouse_connect.driver.httputil import get_pool_manager

    options: dict[str, Any] = {
        name: value for name, value in url.query.items() if name in _OF_CONNECTIONS
    }
    verify: Any = url.query.get("verify", True)
    options["verify"] = verify == "proxy" or coerce_bool(verify)
    if host := url.query.get("server_host_name"):
        options |= {"assert_hostname": options["verify"] and host, "server_hostname": host}
    manager: Any = get_pool_manager(**options)
    manager.urlopen = partial(manager.urlopen, redirect=False)
    return manager


def client_of(connection: Connection) -> Any:
    """The driver's client of a connection."""
    driver: Any = connection.connection.driver_connection
    return driver.client


@contextmanager
def using(engine: Engine, sentence: str) -> Iterator[Any]:
    """The driver's client. Raises StoreUnavailable, with the public sentence, for its errors."""
    try:
        with engine.connect() as connection:
            yield client_of(connection)
    except Exception as error:
        if not is_of_database(error):
            raise
        raise store_unavailable(sentence, error) from error


def is_of_database(error: Exception) -> bool:
    """Whether SQLAlchemy or the driver raised the error."""
    from clickhouse_connect.driver.exceptions import Error
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, (SQLAlchemyError, Error))


def refuses_content(error: Exception) -> bool:
    """Whether the driver or the server refused rows for their content: a retry is of no use.

    The driver raises Python's own errors for a value that its column cannot have.
    """
    from clickhouse_connect.driver.exceptions import DataError

    of_values = (DataError, ValueError, TypeError, AttributeError, OverflowError)
    return isinstance(error, of_values) or getattr(error, "code", None) in _CONTENT_CODES


def insert_rows(
    client: Any,
    table: str,
    columns: Sequence[str],
    types: Sequence[str],
    rows: Sequence[Sequence[Any]],
) -> None:
    """Insert rows as one block; without rows, insert nothing."""
    if rows:
        client.insert(
            table,
            [list(values) for values in zip(*rows, strict=True)],
            column_names=columns,
            column_type_names=types,
            column_oriented=True,
            settings=_OF_INSERTS,
        )
