"""Whether an engine was told to compute nothing for a while: its page does not tell, its log does.

It then keeps its requests, and is neither hung nor short of anything. With the pause it may throw
its requests back, which its page counts as preemptions at the first step after it.
"""

from dataclasses import replace

from agent.analysis.failures.beats import stepped
from agent.analysis.failures.poll import Evidence, Poll
from agent.analysis.failures.state import Pause, Watching
from agent.catalog.failure_lines import LineMeaning

_OF_PAUSES = frozenset({LineMeaning.PAUSED, LineMeaning.RESUMED})
# A page is read before the log, and so may show only at the next poll what the log told at this.
_SHOWN_POLLS_LATER = 2


def pause_after(poll: Poll, before: Watching) -> Pause | None:
    """The last pause of the engine, over or not.

    The line that ends it may be missed: it is over as well once the engine made steps between two
    pages that were read after it began.
    """
    said = [finding.meaning for finding in poll.findings if finding.meaning in _OF_PAUSES]
    pause = before.pause
    if said and said[-1] is LineMeaning.PAUSED:
        return Pause(at=poll.at)
    if said:
        return replace(pause or Pause(at=poll.at), polls_since=1)
    if pause is None:
        return None
    if pause.polls_since or (pause.page_read and stepped(before.sample, poll.sample)):
        return replace(pause, polls_since=pause.polls_since + 1)
    return replace(pause, page_read=pause.page_read or poll.sample is not None)


def throws_back(pause: Pause | None) -> bool:
    """Whether a pause may be why requests were thrown back."""
    return pause is not None and pause.polls_since <= _SHOWN_POLLS_LATER


def pause_noted(pause: Pause | None) -> Evidence:
    """When the engine was last told to pause, in Unix time, where it was."""
    return {} if pause is None else {"paused_at": pause.at}
