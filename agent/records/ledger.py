"""What an engine counted beside what rows of its requests say; both add up over minutes."""

from dataclasses import dataclass

from agent.records.cost_and_work import Addable


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Addable):
    """An engine's counts of some time, and those of the rows; what it does not count is None."""

    input_tokens: float | None = None
    """Prompt tokens that the engine counted."""
    output_tokens: float | None = None
    """Output tokens that the engine counted."""
    requests: float | None = None
    """Requests that the engine counted by their first tokens, each choice for itself."""
    finished: float | None = None
    """Requests that the engine counted as finished."""
    refused: float | None = None
    """Requests that the engine refused to admit."""
    died: float = 0.0
    """Requests that were in the engine when it ended, and have no row."""
    row_input_tokens: float = 0.0
    """Prompt tokens of rows."""
    row_output_tokens: float = 0.0
    """Output tokens of rows."""
    row_requests: float = 0.0
    """Requests with a row, each choice for itself."""
    row_finished: float = 0.0
    """Requests with a row that ended by themselves."""
    row_refused: float = 0.0
    """Requests with a row that were refused."""
    untold_rows: float = 0.0
    """Rows whose tokens are unknown."""
