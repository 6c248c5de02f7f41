"""What an engine counted beside what rows of its requests say; both add up over minutes."""

from dataclasses import dataclass

from agent.records.cost_and_work import Addable


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Addable):
    """An engine's counts of some time, and those of the rows; what it does not count is None.

    `requests` had their first token in this time, each choice of `n` for itself, as engines count.
    `finished` ended by themselves, and `refused` were never admitted. `died` were in the engine
    when it ended, and have no row. Of `untold_rows` the tokens are unknown.
    """

    input_tokens: float | None = None
    output_tokens: float | None = None
    requests: float | None = None
    finished: float | None = None
    refused: float | None = None
    died: float = 0.0
    row_input_tokens: float = 0.0
    row_output_tokens: float = 0.0
    row_requests: float = 0.0
    row_finished: float = 0.0
    row_refused: float = 0.0
    untold_rows: float = 0.0
