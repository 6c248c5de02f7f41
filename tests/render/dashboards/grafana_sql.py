"""SQL as Grafana sends it to PostgreSQL: its macros and variables written out.

As pkg/tsdb/grafana-postgresql-datasource/macros.go and the formats of variables do it.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def written_out(
    statement: str, chosen: Mapping[str, Sequence[str]], shown: tuple[float, float], every_s: int
) -> str:
    """The statement for these values of variables, the time shown and the step of a graph."""
    start, end = (datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") for at in shown)

    def quoted(found: re.Match[str]) -> str:
        return ",".join("'" + value.replace("'", "''") + "'" for value in chosen[found[1]])

    def grouped(found: re.Match[str]) -> str:
        return f'floor(extract(epoch from {found[1]})/{every_s})*{every_s} AS "time"'

    statement = re.sub(r"\$\{(\w+):sqlstring\}", quoted, statement)
    statement = re.sub(r"\$__timeFilter\((\w+)\)", rf"\1 BETWEEN '{start}' AND '{end}'", statement)
    return re.sub(r"\$__timeGroupAlias\((\w+), \$__interval\)", grouped, statement)
