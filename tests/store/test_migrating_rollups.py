"""Rollups of earlier versions, converted by migrations."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from agent.analysis.tally import Tally
from agent.catalog.definitions import Verdict
from agent.records.request import Status
from agent.store.migrating import upgrade
from agent.store.rollups import FIGURES, Series
from tests.store.making import (
    NOON,
    counted_rollups,
    decoded,
    judgement,
    request,
    rollup_bytes,
    store,
)
from tests.store.test_migrating import BYTES, ROLLUPS, SCRIPTS, downgrade, rows_of

pytestmark = pytest.mark.slow


def _dense(bins: Mapping[int, int]) -> list[Any]:
    first = min(bins)
    return [first, [bins.get(place, 0) for place in range(first, max(bins) + 1)]]


def old_texts(tallies: Mapping[Any, Tally]) -> list[dict[str, Any]]:
    """Rollups of 10 s and a minute as the first revision stored them."""
    return [
        {
            **dict(zip(("width_s", "starts_at", *Series._fields[:-1]), place, strict=False)),
            "objectives": ",".join(json.loads(place[-1])),
            "tally": json.dumps(
                {
                    "requests": tally.requests,
                    "statuses": tally.statuses,
                    "seen_at_proxy": tally.seen_at_proxy,
                    "input_tokens": [tally.input_tokens, tally.input_tokens_known],
                    "output_tokens": [tally.output_tokens, tally.output_tokens_known],
                    "verdicts": [
                        [*key, counts.requests, counts.output_tokens]
                        for key, counts in tally.verdicts.items()
                    ],
                    "bins": {name: _dense(bins) for name, bins in tally.bins.items()},
                }
            ),
        }
        for place, tally in tallies.items()
        if place[0] <= 60
    ]


def store_some_days(engine: Engine) -> None:
    """Stores requests of unknown input length: rollups of every version count them alike."""
    kinds = (
        {"ttft_s": 0.25, "e2e_s": 3.0, "output_tokens": 10**9},
        {"ttft_s": 90.0, "status": Status.ERROR, "tenant": "acme, inc"},
        {"model": "größe", "queue_s": 0.0, "agent": "agent-1"},
    )
    missed = judgement(Verdict.MISSED, chat=Verdict.MISSED, batch=Verdict.MET)
    requests = [
        request(
            n,
            missed if n % 2 else judgement(),
            ended_at=NOON - 1800.0 * (n // 4),
            **kinds[n % len(kinds)],
        )
        for n in range(400)
    ]
    for of_half_an_hour in zip(*[iter(requests)] * 4, strict=True):
        store(engine, of_half_an_hour)


def test_an_agent_of_an_earlier_version_cannot_write_in_the_old_encoding(
    empty_database: Engine,
) -> None:
    """It keeps running while another agent migrates the database of both."""
    upgrade(empty_database)
    for statement in ROLLUPS["0004"]:
        if "objectives" in statement:
            with (
                pytest.raises(DBAPIError, match="objectives"),
                empty_database.begin() as connection,
            ):
                connection.execute(
                    text(statement.replace("BYTES", BYTES[empty_database.dialect.name]))
                )


@pytest.mark.parametrize("revision", ["0004", "0007", "0008"])
def test_rollups_and_changes_of_old_encodings_are_converted(
    empty_database: Engine, revision: str
) -> None:
    upgrade(empty_database)
    store_some_days(empty_database)
    changes = rows_of(empty_database)["rollup_changes"]
    expected = rollup_bytes(empty_database)
    series = rows_of(empty_database)["rollup_series"]
    rows = rows_of(empty_database)["rollups"]
    downgrade(empty_database, revision)
    insert_in_old_encoding(empty_database, "rollup_series", series, {})
    judged = {row["id"]: row["judged_by"] for row in series}
    insert_in_old_encoding(empty_database, "rollups", rows, judged)
    upgrade(empty_database)
    assert rollup_bytes(empty_database) == expected
    downgrade(empty_database, revision)
    insert_in_old_encoding(empty_database, "rollup_changes", changes, {})
    upgrade(empty_database)
    converted = sorted(rows_of(empty_database)["rollup_changes"], key=itemgetter("id"))
    assert converted == sorted(changes, key=itemgetter("id"))
    assert rollup_bytes(empty_database) == expected


def insert_in_old_encoding(
    engine: Engine, table: str, rows: Sequence[dict[str, Any]], judged: Mapping[int, str]
) -> None:
    """Insert rows in the encoding of revision 0004; `judged` has the objectives of each series."""
    old: Any = SCRIPTS.get_revision("0004").module
    encoded = []
    for row in map(dict, rows):
        judged_by = row.pop("judged_by", None)
        objectives = judged_by or judged[row["series"]]
        joined = ",".join(json.loads(objectives))
        figures = [row[name] for name in FIGURES if name in row]
        tally = decoded(objectives, figures) if figures else None
        counts = (
            dict(zip(FIGURES, old._encoded(_counter(tally), joined), strict=True)) if tally else {}
        )
        names = {"objectives": joined} if judged_by else {}
        encoded.append(row | names | counts)
    places = ", ".join(f":{name}" for name in encoded[0])
    with engine.begin() as connection:
        insert = text(f"INSERT INTO {table} ({', '.join(encoded[0])}) VALUES ({places})")
        connection.execute(insert, encoded)


def _counter(tally: Tally) -> Counter[Any]:
    """The counts as revision 0004 keys them."""
    counts: Counter[Any] = Counter(requests=tally.requests, seen=tally.seen_at_proxy)
    counts["input_tokens"] = tally.input_tokens
    counts["input_tokens", "known"] = tally.input_tokens_known
    counts["output_tokens"] = tally.output_tokens
    counts["output_tokens", "known"] = tally.output_tokens_known
    for status, count in tally.statuses.items():
        counts["status", status] = count
    for key, verdicts in tally.verdicts.items():
        counts["verdict", *key] = verdicts.requests
        counts["tokens", *key] = verdicts.output_tokens
    for measure, bins in tally.bins.items():
        for place, count in bins.items():
            counts["bin", measure, place] = count
    return counts


@pytest.mark.parametrize("revision", ["0001", "0002", "0003"])
def test_upgraded_rollups_have_the_bytes_that_this_version_writes(
    empty_database: Engine, revision: str
) -> None:
    upgrade(empty_database)
    store_some_days(empty_database)
    expected, texts = rollup_bytes(empty_database), old_texts(counted_rollups(empty_database))
    downgrade(empty_database, revision)
    names = [name for name in texts[0] if name != "input_length"]
    places = ", ".join(f":{name}" for name in names)
    with empty_database.begin() as connection:
        connection.execute(
            text(f"INSERT INTO rollups ({', '.join(names)}) VALUES ({places})"), texts
        )
    upgrade(empty_database)
    assert rollup_bytes(empty_database) == expected
    assert len(expected) > 500
