"""Whether an engine was told to compute nothing for a while: its page does not tell, its log does.

It then keeps its requests, and is neither hung nor short of anything. With the pause it may throw
its requests back, which its page counts as preemptions at the first step after it.
"""

from agent.analysis.failures.poll import Poll
from agent.analysis.failures.state import Watching
from agent.catalog.failure_lines import LineMeaning

_SINCE = {LineMeaning.PAUSED: 0, LineMeaning.RESUMED: 1}
# A page is read before the log, and so may show only at the next poll what the log told at this.
_SHOWN_POLLS_LATER = 2


def polls_since_pause(poll: Poll, before: Watching) -> int | None:
    """How many polls ago the engine was last paused: 0 while it is, None for never."""
    said = [finding.meaning for finding in poll.findings if finding.meaning in _SINCE]
    if said:
        return _SINCE[said[-1]]
    ago = before.polls_since_pause
    return ago + 1 if ago else ago


def throws_back(ago: int | None) -> bool:
    """Whether a pause so many polls ago may be why requests were thrown back."""
    return ago is not None and ago <= _SHOWN_POLLS_LATER
