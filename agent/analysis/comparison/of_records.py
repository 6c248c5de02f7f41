"""A run made of single requests, judged by one objective."""

from collections.abc import Mapping, Sequence

import numpy as np

from agent.analysis.comparison.run_columns import RunColumns
from agent.analysis.verdicts import judge
from agent.catalog.definitions import Verdict
from agent.records.columns import Array
from agent.records.objective import Objective
from agent.records.request import BY_CLIENT, FAILED, RequestRecord, Status

_MET = {Verdict.MET: 1.0, Verdict.MISSED: 0.0, Verdict.UNDETERMINED: np.nan}
# How a status counts in an error ratio.
FAILURE = {status: np.nan if status in BY_CLIENT else float(status in FAILED) for status in Status}


def run_of(
    name: str,
    records: Sequence[RequestRecord],
    objective: Objective | None,
    configured_load: Mapping[str, str],
) -> RunColumns:
    """A run that begins with its first request and ends with its last one."""
    began_at = min(record.started_at for record in records)

    def column(field: str) -> Array:
        # None becomes NaN.
        return np.array([getattr(record, field) for record in records], dtype=float)

    ended_s = column("ended_at") - began_at
    met = [np.nan if objective is None else _MET[judge(each, objective)] for each in records]
    return RunColumns(
        name=name,
        length_s=max(float(ended_s.max()), 1e-3),
        ended_s=ended_s,
        ttft_s=column("ttft_s"),
        tpot_s=column("tpot_s"),
        e2e_s=column("e2e_s"),
        input_tokens=column("input_tokens"),
        output_tokens=column("output_tokens"),
        met=np.array(met),
        failed=np.array([FAILURE[record.status] for record in records]),
        configured_load=configured_load,
    )
