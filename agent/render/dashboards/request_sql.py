"""SQL of the panels on the table `requests`, with Grafana's macros and variables.

Values of variables enter a statement only as quoted strings (`:sqlstring`). Statements select
counted requests by `started_at`, which has an index.
"""

from collections.abc import Mapping

from agent.analysis.conversations import BLOCK_TOKENS, TURN_BUCKETS
from agent.analysis.tally import EDGES_TOKENS, INPUT_LENGTHS

Bounds = tuple[int, int | None]

_BOUNDS = zip((0, *EDGES_TOKENS), (*EDGES_TOKENS, None), strict=True)
_INPUT_LENGTHS: Mapping[str, Bounds] = dict(zip(INPUT_LENGTHS, _BOUNDS, strict=True))
OUTPUT_LENGTHS: Mapping[str, Bounds] = {
    "0-64": (0, 64),
    "64-256": (64, 256),
    "256-1k": (256, 1024),
    "1k-4k": (1024, 4096),
    "4k+": (4096, None),
}
WORST_BY = ("e2e", "ttft", "tpot", "queue", "max gap")

# An engine without requests may have events.
ENGINES = """\
SELECT coalesce(engine, 'unknown') FROM requests WHERE $__timeFilter(started_at)
UNION
SELECT engine FROM events WHERE $__timeFilter(at) AND engine IS NOT NULL"""
MODELS = "SELECT DISTINCT coalesce(model, 'unknown') FROM requests WHERE $__timeFilter(started_at)"
TENANTS = (
    "SELECT DISTINCT coalesce(tenant, 'unknown') FROM requests WHERE $__timeFilter(started_at)"
)
OBJECTIVES = "SELECT DISTINCT name FROM objectives WHERE in_force_until IS NULL ORDER BY name"

# Arrays, because IN () is not valid SQL when there is no value to choose yet.
_CHOSEN = """\
counted
  AND $__timeFilter(started_at)
  AND coalesce(engine, 'unknown') = ANY (ARRAY[${engine:sqlstring}]::text[])
  AND coalesce(model, 'unknown') = ANY (ARRAY[${model:sqlstring}]::text[])
  AND coalesce(tenant, 'unknown') = ANY (ARRAY[${tenant:sqlstring}]::text[])"""
# NULL if the objective does not cover the request.
_VERDICT = "verdicts::jsonb ->> ${objective:sqlstring}"
_JUDGED = f"""\
WITH judged AS (
  SELECT *, {_VERDICT} AS judgement
  FROM requests
  WHERE {_CHOSEN}
    AND verdicts::jsonb ? ${{objective:sqlstring}}
)
"""
_ATTAINMENT = """\
count(*) FILTER (WHERE judgement = 'met')::float
    / nullif(count(*) FILTER (WHERE judgement IN ('met', 'missed')), 0)"""

# Milliseconds before and after a request, to show what led to it.
AROUND_MS = 5 * 60 * 1000
# Columns for links, because Grafana cannot calculate in a link; texts, so that it formats no
# number. A variable without a data source is empty; only a query to Tempo needs a type.
FOR_LINKS = ("shown_from", "shown_until", "trace_source", "trace_query")
_FOR_LINKS = f"""\
(floor(extract(epoch FROM started_at) * 1000)::bigint - {AROUND_MS})::text AS shown_from,
  (ceil((extract(epoch FROM started_at) + coalesce(e2e_s, 0)) * 1000)::bigint + {AROUND_MS})::text
    AS shown_until,
  coalesce(nullif(${{tempo_datasource:sqlstring}}, ''), ${{jaeger_datasource:sqlstring}})
    AS trace_source,
  CASE ${{tempo_datasource:sqlstring}} WHEN '' THEN '' ELSE 'traceql' END AS trace_query"""
_FIGURES = f"""\
started_at AS began, request_id AS request, trace_id AS trace, engine, model, tenant,
  coalesce({_VERDICT}, verdict) AS verdict, status,
  ttft_s AS ttft, tpot_s AS tpot, e2e_s AS e2e,
  queue_s AS queue, prefill_s AS prefill, decode_s AS decode, max_gap_s AS "max gap",
  holdback_s AS "hold-back",
  input_tokens AS input, cached_tokens AS cached, output_tokens AS output,
  finish_reason AS finish, cause,
  {_FOR_LINKS}"""

WORST = f"""\
SELECT {_FIGURES}
FROM requests
WHERE {_CHOSEN}
ORDER BY CASE ${{worst_by:sqlstring}}
    WHEN 'ttft' THEN ttft_s
    WHEN 'tpot' THEN tpot_s
    WHEN 'queue' THEN queue_s
    WHEN 'max gap' THEN max_gap_s
    ELSE e2e_s
  END DESC NULLS LAST, id DESC
LIMIT 50"""


def _between(column: str, bounds: Bounds) -> str:
    low, high = bounds
    return f"{column} >= {low}" + ("" if high is None else f" AND {column} < {high}")


def _length_case(column: str, lengths: Mapping[str, Bounds], result: str) -> str:
    cases = (
        f"WHEN {_between(column, bounds)} THEN {result.format(index=index, name=name)}"
        for index, (name, bounds) in enumerate(lengths.items())
    )
    return f"CASE {' '.join(cases)} END"


def _cells() -> str:
    cells = []
    for name, bounds in OUTPUT_LENGTHS.items():
        here = _between("output_tokens", bounds)
        cells.append(
            f"count(*) FILTER (WHERE judgement = 'met' AND {here})::float\n"
            f"    / nullif(count(*) FILTER (WHERE judgement IN ('met', 'missed') AND {here}), 0)"
            f' AS "out {name}"'
        )
    return ",\n  ".join(cells)


# One row with the lower bound of each colour; several agents may have an objective of this name.
COLOURS = """\
SELECT -1 AS unknown, 0 AS below, max((definition::jsonb ->> 'target')::float) AS target
FROM objectives
WHERE name = ${objective:sqlstring} AND in_force_until IS NULL"""

ATTAINMENT_BY_LENGTH = f"""\
{_JUDGED}SELECT {_length_case("input_tokens", _INPUT_LENGTHS, "'{name}'")} AS input,
  count(*) FILTER (WHERE judgement IN ('met', 'missed')) AS judged,
  {_cells()}
FROM judged
WHERE input_tokens IS NOT NULL
GROUP BY 1, {_length_case("input_tokens", _INPUT_LENGTHS, "{index}")}
ORDER BY {_length_case("input_tokens", _INPUT_LENGTHS, "{index}")}"""

ATTAINMENT_BY_TENANT = f"""\
{_JUDGED}SELECT coalesce(tenant, 'unknown') AS tenant,
  count(*) FILTER (WHERE judgement IN ('met', 'missed')) AS judged,
  {_ATTAINMENT} AS attainment
FROM judged
GROUP BY 1
ORDER BY attainment NULLS LAST, judged DESC
LIMIT 100"""

CACHED_BY_TENANT = f"""\
{_JUDGED}SELECT coalesce(tenant, 'unknown') AS tenant, count(*) AS requests,
  sum(input_tokens) AS input,
  sum(cached_tokens)::float / nullif(sum(input_tokens), 0) AS cached
FROM judged
WHERE input_tokens IS NOT NULL AND cached_tokens IS NOT NULL
GROUP BY 1
ORDER BY input DESC
LIMIT 100"""

VERDICTS_OVER_TIME = f"""\
{_JUDGED}SELECT $__timeGroupAlias(started_at, $__interval), judgement AS metric, count(*) AS value
FROM judged
GROUP BY 1, 2
ORDER BY 1"""

_PHASES_S = "sum(coalesce(queue_s, 0) + coalesce(prefill_s, 0) + coalesce(decode_s, 0))"

PHASES_BY_VERDICT = f"""\
{_JUDGED}SELECT judgement AS verdict, count(*) AS requests,
  sum(queue_s) / nullif({_PHASES_S}, 0) AS queue,
  sum(prefill_s) / nullif({_PHASES_S}, 0) AS prefill,
  sum(decode_s) / nullif({_PHASES_S}, 0) AS decode
FROM judged
GROUP BY 1
ORDER BY 1"""

_BUCKET = " ".join(
    f"WHEN turn >= {first} THEN '{name}'" for name, (first, _) in [*TURN_BUCKETS.items()][::-1]
)
# As agent.analysis.conversations computes them.
TURNS = f"""\
WITH turns AS (
  SELECT *,
    row_number() OVER session AS turn,
    extract(epoch FROM started_at - lag(ended_at) OVER session) AS gap_s,
    lag(input_tokens) OVER session AS prompt_before
  FROM requests
  WHERE {_CHOSEN}
    AND session IS NOT NULL AND status IN ('ok', 'cancelled')
  WINDOW session AS (PARTITION BY session ORDER BY started_at, id)
), refilled AS (
  SELECT *,
    CASE WHEN input_tokens >= prompt_before AND prompt_before - cached_tokens > {BLOCK_TOKENS}
      THEN prompt_before - cached_tokens END AS refilled_tokens
  FROM turns
)
SELECT CASE {_BUCKET} END AS turn, count(*) AS turns,
  percentile_disc(0.5) WITHIN GROUP (ORDER BY ttft_s) AS "TTFT p50",
  percentile_disc(0.95) WITHIN GROUP (ORDER BY ttft_s) AS "TTFT p95",
  sum(cached_tokens) FILTER (WHERE input_tokens IS NOT NULL)::float
    / nullif(sum(input_tokens) FILTER (WHERE cached_tokens IS NOT NULL), 0) AS cached,
  percentile_disc(0.5) WITHIN GROUP (ORDER BY gap_s) FILTER (WHERE gap_s >= 0) AS "gap p50",
  sum(refilled_tokens) AS "computed again"
FROM refilled
GROUP BY 1
ORDER BY min(turn)"""

# The shares of a request over this objective's limits; none if it is not explained.
_SHARES = "jsonb_array_elements(explanation::jsonb -> 'shares')"
CAUSES = f"""\
{_JUDGED}SELECT
  coalesce(share ->> 'cause', CASE status WHEN 'ok' THEN 'not explained' ELSE status END) AS cause,
  count(DISTINCT judged.id) AS missed,
  sum((share ->> 'excess_s')::float) AS excess,
  sum((share ->> 'excess_s')::float) / nullif(sum(sum((share ->> 'excess_s')::float)) OVER (), 0)
    AS share
FROM judged
LEFT JOIN LATERAL {_SHARES} AS share ON share ->> 'objective' = ${{objective:sqlstring}}
WHERE judgement = 'missed'
GROUP BY 1
ORDER BY excess DESC NULLS LAST, missed DESC"""

# Without a time range: an id is searched in all requests.
_IDS = ("request_id", "engine_request_id", "response_id", "trace_id")
_ONE = f"""\
FROM requests
WHERE counted AND ({" OR ".join(f"{column} = ${{request:sqlstring}}" for column in _IDS)})"""

ONE_AT_A_GLANCE = f"""\
SELECT {_FIGURES}
{_ONE}
ORDER BY began DESC, span_id
LIMIT 10"""

PHASES_OF_ONE = f"""\
WITH one AS (
  SELECT * {_ONE}
  ORDER BY started_at DESC
  LIMIT 10
)
SELECT phase || CASE WHEN count(*) OVER (PARTITION BY phase) > 1
    THEN ' ' || right(span_id, 4) ELSE '' END AS phase, seconds
FROM one CROSS JOIN LATERAL (VALUES
  (1, 'front', coalesce(holdback_s, 0)), (2, 'queue', queue_s), (3, 'prefill', prefill_s),
  (4, 'decode', decode_s), (5, 'in all', e2e_s)
) AS phases (position, phase, seconds)
WHERE seconds IS NOT NULL
ORDER BY span_id, position"""

ONE = f"""\
WITH one AS (
  SELECT * {_ONE}
  ORDER BY started_at DESC
  LIMIT 10
)
SELECT right(one.span_id, 4) AS span, figure.key AS figure, figure.value #>> '{{}}' AS value
FROM one CROSS JOIN LATERAL jsonb_each(to_jsonb(one) - 'id' - 'counted') AS figure
WHERE figure.value <> 'null'::jsonb
ORDER BY one.span_id, figure.key"""

# Events of the chosen engines, and events without an engine, such as those of a GPU.
EVENTS = """\
SELECT at AS time, kind || coalesce(' on ' || coalesce(engine, gpu), '') AS title,
  evidence AS text, concat_ws(',', kind, confidence, engine, gpu) AS tags
FROM events
WHERE $__timeFilter(at)
  AND (engine IS NULL OR engine = ANY (ARRAY[${engine:sqlstring}]::text[]))
ORDER BY at"""
