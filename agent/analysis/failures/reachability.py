"""UNREACHABLE and RESTART: an engine that sends no metrics, and another process that does."""

from collections.abc import Iterator

from agent.analysis.failures.compared_poll import ComparedPoll
from agent.analysis.failures.findings import Findings
from agent.records.event import Confidence, Event, EventKind


class UnreachableDetector:
    """Reports that an engine that was reachable is not, once for each outage."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The outage that begins with this poll."""
        if not seen.poll.unreachable or not seen.reachable:
            return
        evidence = {
            "reason": seen.poll.failure,
            **seen.last_figures(),
            "stop_line": found.stop_line,
            "cause": found.cause,
        }
        yield seen.poll.event(EventKind.UNREACHABLE, Confidence.CERTAIN, evidence)


class RestartDetector:
    """Reports that the engine restarted, and for how long it was gone."""

    def observe(self, seen: ComparedPoll, found: Findings) -> Iterator[Event]:
        """The restart that this poll shows."""
        if seen.restart is None or seen.poll.sample is None:
            return
        # An engine that no poll missed was gone for no longer than between two samples.
        gone_since_s = seen.outage.since_s if seen.outage else seen.before_s
        evidence = {
            **seen.last_figures(),
            "new_process_started_at": seen.poll.sample.process_started_at,
            "gone_s": None if gone_since_s is None else seen.poll.clock_s - gone_since_s,
            "stop_line": found.stop_line,
            "cause": found.cause,
        }
        yield seen.poll.event(EventKind.RESTART, seen.restart, evidence)
