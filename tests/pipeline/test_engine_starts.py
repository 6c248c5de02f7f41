"""Which polls show a start, when its event comes, and what is in it."""

import pytest

from agent.catalog.engine_facts import OUTPUT_TOKENS
from agent.pipeline.engine_starts import FIRST_REQUEST_WITHIN_S, SPANS_COME_S, EngineStarts
from agent.records.engine import EngineSample, LoadingSpan
from agent.records.event import Event
from tests.records.making import NOON, judged, objective, record

EVERY_S = 5.0


class Watched:
    """An engine polled every 5 s; `process` began at NOON + 10 unless a test says otherwise."""

    def __init__(self) -> None:
        self.starts = EngineStarts()
        self.watch = self.starts.of("chat-0")
        self.now = float(NOON)
        self.events: list[Event] = []

    def away(self, polls: int = 1) -> None:
        for _ in range(polls):
            self._polled(None)

    def up(
        self,
        polls: int = 1,
        *,
        began_at: float | None = NOON + 10,
        tokens: float = 0.0,
        restarted: bool = False,
    ) -> None:
        sample = EngineSample(
            engine="chat-0",
            at=self.now,
            dialect="vllm",
            model="m",
            facts={(OUTPUT_TOKENS.name, ()): tokens},
            process_started_at=began_at,
        )
        for _ in range(polls):
            self._polled(sample, restarted=restarted)
            restarted = False

    def _polled(self, sample: EngineSample | None, *, restarted: bool = False) -> None:
        event = self.watch.poll(sample, self.now, restarted=restarted)
        self.now += EVERY_S
        if event is not None:
            self.events.append(event)

    def sends(self, name: str, began_s: float, ended_s: float, engine: str = "chat-0") -> None:
        self.starts.loading([LoadingSpan(engine, name, NOON + began_s, NOON + ended_s)])

    def serves(self, first_token_s: float) -> None:
        """A request whose first token came so long after NOON."""
        started_at = NOON + first_token_s - 0.2
        one = record(1, engine="chat-0", started_at=started_at, ended_at=started_at + 1, ttft_s=0.2)
        self.starts.counted(judged([one], [objective()]))


@pytest.fixture
def engine() -> Watched:
    return Watched()


LONG = int(FIRST_REQUEST_WITHIN_S / EVERY_S) + 2


def test_a_start_is_one_event_with_its_phases_and_its_first_request(engine: Watched) -> None:
    engine.away(12)
    engine.sends("Overall Loading", 20, 50)
    engine.sends("Load weights", 25, 45)
    engine.sends("Load weights", 0, 60, engine="another")
    engine.up()
    engine.serves(64.5)
    engine.up(5, tokens=100)
    [event] = engine.events
    assert (event.kind, event.at, event.engine) == ("STARTED", NOON + 60, "chat-0")
    assert event.evidence == pytest.approx(
        {
            "began_at": NOON + 10,
            "start_s": 50,
            "first_request_s": 54.5,
            "boot_s": 10,
            "processes_s": 10,
            "weights_s": 20,
            "front_s": 10,
        }
    )
    phases = engine.starts.last_s("chat-0")
    assert sum(phases.values()) == pytest.approx(50)
    engine.up(LONG)
    assert len(engine.events) == 1


def test_spans_that_come_after_the_engine_is_up_are_in_the_event(engine: Watched) -> None:
    engine.away(4)
    engine.up(tokens=5)
    engine.up(int(SPANS_COME_S / EVERY_S) - 1, tokens=5)
    engine.sends("Load weights", 10, 12)
    assert engine.events == []
    engine.up(tokens=5)
    assert engine.events[0].evidence["weights_s"] == pytest.approx(2)


def test_by_metrics_alone_a_start_has_its_length_and_its_first_request(engine: Watched) -> None:
    engine.away(12)
    engine.up(3)
    engine.up(2, tokens=7)
    assert engine.events[0].evidence == {
        "began_at": NOON + 10,
        "start_s": 50,
        # Of the poll that showed it: at most an interval late.
        "first_request_s": 65,
    }


def test_a_start_without_a_request_for_minutes_is_reported_without_one(engine: Watched) -> None:
    engine.away()
    engine.up(LONG)
    assert [event.evidence["start_s"] for event in engine.events] == [-5]


def test_a_restart_is_a_start_also_while_the_one_before_waits_for_a_request(
    engine: Watched,
) -> None:
    engine.away()
    engine.up(2)
    engine.up(began_at=NOON + 12, restarted=True)
    assert [event.at for event in engine.events] == [NOON + 5]
    engine.up(LONG, began_at=NOON + 12, tokens=9)
    assert [event.at for event in engine.events] == [NOON + 5, NOON + 15]


def test_an_engine_that_ran_before_the_agent_did_not_start(engine: Watched) -> None:
    engine.up(LONG, tokens=5)
    engine.away(3)
    engine.up(LONG, tokens=5)
    assert engine.events == []


def test_an_engine_that_the_agent_could_not_reach_at_first_did_not_start(engine: Watched) -> None:
    engine.away(3)
    engine.up(LONG, began_at=NOON - 3600, tokens=1e6)
    assert engine.events == []


def test_a_restart_that_only_the_next_agent_sees_has_no_time_at_which_it_was_ready(
    engine: Watched,
) -> None:
    engine.up(LONG, restarted=True)
    assert engine.events == []


def test_a_request_of_the_process_before_is_not_the_first_one(engine: Watched) -> None:
    engine.away()
    engine.up()
    engine.serves(8)
    engine.up(LONG)
    assert "first_request_s" not in engine.events[0].evidence


def test_a_start_of_an_unknown_begin_begins_with_its_first_span(engine: Watched) -> None:
    engine.away(4)
    engine.sends("Load weights", -9000, -8000)
    engine.sends("Load weights", 5, 12)
    engine.up(began_at=None)
    engine.up(4, began_at=None, tokens=1)
    evidence = engine.events[0].evidence
    assert (evidence["began_at"], evidence["start_s"]) == (NOON + 5, 15)


def test_without_spans_and_without_a_begin_only_the_moment_is_known(engine: Watched) -> None:
    engine.away(4)
    engine.up(began_at=None)
    engine.up(4, began_at=None, tokens=1)
    assert engine.events[0].evidence == {}
