"""What each table and each column means, for docs/reference/tables.md.

Columns that hold a field of a record are described below the field.
"""

from collections.abc import Mapping

_CHANGED = {"changed": "Number of the transaction in the agent's file that last changed the row."}
_SHARED = {
    "agent": "The agent that counted the requests.",
    "engine": "Their engine; empty if unknown.",
    "model": "Their model; empty if unknown.",
    "tenant": "Their tenant; empty if unknown.",
    "input_length": "Their group of input lengths; `*` for all together, empty if unknown.",
    "judged_by": "JSON list of the names of the objectives that judged them.",
}
_FIGURES = {
    "counts": "Requests, tokens, statuses and verdicts, as a vector of whole numbers.",
    "ttft_s": "Bins of TTFT.",
    "tpot_s": "Bins of TPOT.",
    "e2e_s": "Bins of the time to the last token.",
    "queue_s": "Bins of the wait in the engine.",
}
_ROLLUP = {
    **_CHANGED,
    "width_s": "Length of the rollup.",
    "series": "`id` of its row in `rollup_series`.",
    "starts_at": "First second of the rollup.",
}
_SAMPLE = {
    **_CHANGED,
    "id": "Number of the row.",
    "at": "When the sample was read.",
    "agent": "The agent that read it.",
}

# By table and column; the table itself is ''.
MEANINGS: Mapping[str, Mapping[str, str]] = {
    "requests": {
        "": "One row for each request; [glossary.md](../glossary.md) has the views.",
        "id": "Number of the row.",
        "verdict": "Whether the request met all its objectives: met, missed or undetermined.",
        "verdicts": "JSON: the verdict of each objective by its name.",
        "settles_at": "When the row is counted, or its verdict is final, if no other view comes.",
        "counted": "Whether the row is in counters and rollups; others are a part of another row.",
        "prefill_flops": "FLOPs of its prefill.",
        "prefill_kv_bytes": "Bytes of KV cache that its prefill moved.",
        "decode_flops": "FLOPs of its decode.",
        "decode_kv_bytes": "Bytes of KV cache that its decode moved.",
        "priced_at": "When it got its share of all minutes that it ran in.",
        "gpu_hours": "Its share of the GPUs' time.",
        "explanation": "JSON: the causes of a miss, with seconds and evidence.",
        "explained_at": "When the miss was first explained.",
        **_CHANGED,
    },
    "engine_samples": {
        "": "One row for each poll of an engine: its metrics as the agent read them.",
        **_SAMPLE,
        "engine": "The engine.",
        "model": "The model that it serves.",
        "dialect": "The kind of engine.",
        "facts": "JSON: the values by metric and labels.",
    },
    "gpu_samples": {
        "": "One row for each GPU and minute.",
        **_SAMPLE,
        "gpu": "UUID of the GPU.",
        "gpu_index": "Its index when it was read.",
        "name": "The product's name.",
        "problem": "Why it could not be read.",
        "facts": "JSON: the values by metric and labels.",
        "processes": "JSON: the memory of each process.",
        "mig_instances": "JSON: its MIG instances with their values.",
    },
    "engine_minutes": {
        "": "One row for each engine and minute, of old ones for each hour or day: "
        "[efficiency.md](../efficiency.md), [cost.md](../cost.md), [ledger.md](../ledger.md).",
        "agent": "The agent that wrote it.",
        "cache_full": "Whether the KV cache was full at any time.",
        **_CHANGED,
    },
    "engine_counts": {
        "": "One row for each engine and minute, hour and day: what the engine counted itself.",
        "agent": "The agent that read it.",
        "engine": "The engine.",
        "width_s": "Length of the time that it covers: a minute, an hour or a day.",
        "starts_at": "When that time begins, in Unix seconds.",
        "model": "The model that the engine served last.",
        "until": "When the engine was last read.",
        "covered_s": "Seconds between samples, in which every increase was seen.",
        "counters": "JSON: increases by metric and labels.",
        "gauges": "JSON: of each gauge its integral over time, the seconds of that, its maximum; "
        "labels follow its name after `|`.",
        "histograms": "JSON: of each histogram the finite bounds, the increases of the cumulative "
        "counts, and of the sum.",
        **_CHANGED,
    },
    "events": {
        "": "One row for each thing that broke or changed: [failures.md](../failures.md).",
        "id": "Number of the row.",
        "at": "When it happened.",
        "agent": "The agent that found it.",
        "engine": "The engine that it is about.",
        "gpu": "UUID of the GPU that it is about.",
        "kind": "What happened.",
        "confidence": "How sure the agent is.",
        "evidence": "JSON: what supports it.",
        **_CHANGED,
    },
    "objectives": {
        "": "One row for each objective and the time for which it was in force.",
        "id": "Number of the row.",
        "agent": "The agent that judged by it.",
        "name": "Its name.",
        "definition": "JSON: its limits, target and window.",
        "in_force_from": "When it came into force.",
        "in_force_until": "When it ended; null while it is in force.",
        "held_rates": "JSON: by engine, the minutes of about each rate that held it or missed it; "
        "null in a shared database.",
    },
    "publishing": {
        "": "The one row of an agent's file; a shared database has none: "
        "[storage.md](../storage.md).",
        "file": "A random name of the file.",
        "last": "Number of the newest transaction.",
        "published": "Up to which number the shared database has everything.",
        "complete_at": "When the shared database last had everything.",
        "last_at_start": "`last` at the start, until the shared database is reached.",
    },
    "published_files": {
        "": "In a shared database one row for each agent's file: [storage.md](../storage.md).",
        "agent": "The agent's name.",
        "file": "The name of its file.",
        "last": "Up to which number this database has its rows.",
        "at": "When it got them.",
    },
    "deleted_requests": {
        "": "In an agent's file: requests that were joined, moved to another start or replaced, "
        "until the shared database has no row of them.",
        "id": "Number of the row.",
        "trace_id": "The trace of the request.",
        "span_id": "Its span.",
        "started_at": "Its start.",
        "changed": "Number of the transaction that deleted it.",
    },
    "agents": {
        "": "One row for each agent that runs, or has run lately: [serving.md](../serving.md).",
        "name": "Its name.",
        "instance": "Its host, its process and a random part.",
        "beats": "How often it has shown that it lives.",
        "version": "Its version.",
        "simulated": "Whether its engines are simulated.",
        "started_at": "When it started, by its own clock.",
        "seen_at": "When it last showed that it lives, by the database's clock.",
        "stopped_at": "When it stopped in order; null while it runs, and after a kill.",
        "waiting_rows": "Rows that wait to be published; null without `storage.publish_to`.",
        "lag_s": "Seconds since none waited; null without `storage.publish_to`.",
        "engines": "JSON: its engines as its own `/api/v1/engines` has them.",
    },
    "rollup_series": {
        "": "One row for each series: what the requests of a rollup have in common.",
        "id": "Number of the row.",
        **_SHARED,
        "file": "In a shared database the name of the agent's file; else empty.",
    },
    "rollups": {
        "": "Counts and latency bins of one series and width: [rollups.md](../rollups.md).",
        **_ROLLUP,
        **_FIGURES,
    },
    "cause_rollups": {
        "": "Missed requests and their excess seconds by cause, in the widths of rollups.",
        **_ROLLUP,
        "objective": "The objective; empty: of each request the one that it exceeded most.",
        "limit_name": "The limit: ttft, tpot or e2e; failure for requests without a response.",
        "cause": "The cause.",
        "requests": "Requests with a share of the cause.",
        "top_requests": "Requests of which it is the first cause.",
        "excess_s": "Seconds over the limit; null where none are known.",
    },
    "rollup_changes": {
        "": "What commits added to counts and bins, and no rollup holds yet.",
        "id": "Number of the row.",
        "starts_at": "First second of the narrowest rollup.",
        **_SHARED,
        "gone": "Whether the requests are subtracted.",
        **_FIGURES,
    },
}
