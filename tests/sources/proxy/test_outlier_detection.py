"""When an engine leaves the rotation, for how long, and how it comes back."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog.reasons import EjectionReason
from agent.sources.proxy.outlier_detection import Ejection, OutlierDetection, OutlierLimits

LIMITS = OutlierLimits()
BASE_S, MAX_S = LIMITS.base_s, LIMITS.max_s
ERROR = EjectionReason.ERROR


class Play:
    """Engines a and b on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.outliers = OutlierDetection(["a", "b"], LIMITS)

    def ejection(self, name: str = "a") -> Ejection:
        return self.outliers.ejections[name]

    def is_in(self, name: str = "a") -> bool:
        return self.outliers.is_in(name, self.now_s)

    def is_due(self, name: str = "a") -> bool:
        return self.outliers.is_due(name, self.now_s)

    def fail(self, times: int = 1, name: str = "a") -> None:
        for _ in range(times):
            self.outliers.failed(name, ERROR, self.now_s)

    def succeed(self, name: str = "a") -> None:
        self.outliers.succeeded(name, self.now_s, self.now_s)

    def probe(self, *, good: bool) -> None:
        """Send a probe at the end of the ejection, and let it end."""
        self.now_s = max(self.now_s, self.ejection().until_s)
        assert self.outliers.begin("a", self.now_s)
        if good:
            self.succeed()
        else:
            self.outliers.failed("a", ERROR, self.now_s, probe=True)

    def unanswered(self, times: int, name: str = "a") -> None:
        for _ in range(times):
            self.outliers.sent(name, self.now_s)


def test_an_unknown_engine_is_always_in() -> None:
    outliers = OutlierDetection((), LIMITS)
    for _ in range(9):
        outliers.failed("a", ERROR, 0.0)
    outliers.eject("a", EjectionReason.EVENT, 0.0, "HANG")
    assert outliers.is_in("a", 0.0)
    assert not outliers.ejections


def test_one_probe_is_sent_when_the_time_is_over() -> None:
    play = Play()
    play.fail(3)
    play.now_s += BASE_S - 0.001
    assert not play.is_due()
    assert not play.outliers.begin("a", play.now_s)
    play.now_s += 0.001
    assert play.outliers.begin("a", play.now_s)
    assert not play.is_due(), "one probe at a time"
    assert not play.outliers.begin("a", play.now_s)


def test_each_failed_probe_doubles_the_time_up_to_the_limit() -> None:
    play = Play()
    play.fail(3)
    lasted_s = []
    for _ in range(6):
        lasted_s.append(play.ejection().until_s - play.ejection().at_s)
        play.probe(good=False)
    assert lasted_s == [BASE_S, 2 * BASE_S, 4 * BASE_S, 8 * BASE_S, MAX_S, MAX_S]
    assert play.ejection().since_s == 1000.0


def test_an_engine_that_is_ejected_again_soon_is_out_for_twice_as_long() -> None:
    play = Play()
    play.fail(3)
    play.probe(good=True)
    play.now_s += MAX_S
    play.fail(3)
    assert play.ejection().until_s - play.now_s == 2 * BASE_S
    play.probe(good=True)
    play.now_s += MAX_S + 1
    play.fail(3)
    assert play.ejection().until_s - play.now_s == BASE_S, "it was good for long enough"


def test_only_a_good_request_since_an_ejection_ends_it() -> None:
    play = Play()
    sent_s = play.now_s
    play.now_s += 1
    play.fail(3)
    until_s = play.ejection().until_s
    play.now_s += 1
    play.fail(5)
    play.outliers.succeeded("a", sent_s, play.now_s)
    assert play.ejection().until_s == until_s
    play.succeed()
    assert play.is_in()


def test_a_probe_whose_client_left_is_followed_by_another_one_later() -> None:
    play = Play()
    play.fail(3)
    play.now_s += BASE_S
    assert play.outliers.begin("a", play.now_s)
    play.outliers.abandoned("a", play.now_s)
    assert not play.is_due()
    play.now_s += BASE_S
    assert play.is_due()
    assert play.outliers.ejected == {("a", ERROR): 1}


def throttle(play: Play, for_s: float | None, *, busy: bool) -> None:
    play.outliers.throttled("a", for_s, play.now_s, busy=busy)


@pytest.mark.parametrize(
    ("for_s", "busy", "paused_s"),
    [
        (5.0, True, 5.0),
        (5.0, False, 5.0),
        (3600.0, True, LIMITS.max_pause_s),
        (3600.0, False, LIMITS.max_pause_s),
        (None, True, LIMITS.pause_s),
        (None, False, 0.0),
    ],
)
def test_a_throttling_engine_is_paused_as_long_as_it_asks_and_at_most_a_minute(
    for_s: float | None, busy: bool, paused_s: float
) -> None:
    play = Play()
    throttle(play, for_s, busy=busy)
    play.now_s += paused_s - 0.1
    assert play.is_in() == (paused_s == 0)
    play.now_s += 0.1
    assert play.is_in()


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_that_answers_503_after_each_pause_is_ejected_and_one_with_429_is_not(
    busy: bool,
) -> None:
    play = Play()
    for _ in range(3):
        throttle(play, 2.0, busy=busy)
        play.now_s += 2.0
    reasons = [ejection.reason for ejection in play.outliers.ejections.values()]
    assert reasons == [EjectionReason.UNAVAILABLE] * busy


def test_an_overloaded_engine_that_answers_some_requests_is_never_ejected() -> None:
    play = Play()
    for _ in range(20):
        for _ in range(10):
            throttle(play, None, busy=True)
        play.succeed()
        play.now_s += LIMITS.pause_s
    assert not play.outliers.ejections


def overtaken(play: Play) -> None:
    """Engine b answers three requests that came later."""
    for _ in range(3):
        play.succeed("b")


@pytest.mark.parametrize(
    ("requests", "others_answer", "sent_before_s"),
    [(50, False, 0.0), (1, True, 0.0), (3, True, 1.0)],
    ids=["no traffic", "one long request", "others were answered before"],
)
def test_it_is_no_silence_unless_several_requests_wait_and_others_are_answered(
    requests: int, others_answer: bool, sent_before_s: float
) -> None:
    play = Play()
    play.unanswered(requests)
    for _ in range(9 * others_answer):
        play.outliers.succeeded("b", play.now_s - sent_before_s, play.now_s)
    play.now_s += 600
    play.outliers.check(play.now_s)
    assert play.is_in()


def test_a_byte_since_the_silence_began_ends_it_and_an_ejection_for_it() -> None:
    play = Play()
    for wait_s in (LIMITS.hold_s, LIMITS.silent_s):
        play.unanswered(3)
        overtaken(play)
        play.outliers.progressed("a", play.now_s - 1)
        assert play.is_in(), "a moment is no silence"
        play.now_s += wait_s
        play.outliers.check(play.now_s)
        assert not play.is_in()
        play.outliers.progressed("a", play.now_s)
        assert play.is_in()
    assert play.outliers.ejected == {("a", EjectionReason.SILENT): 1}


def test_the_agents_event_ejects_and_its_recovery_lets_a_probe_in_at_once() -> None:
    play = Play()
    play.outliers.eject("a", EjectionReason.EVENT, play.now_s, "ENGINE_DEAD")
    assert (play.ejection().reason, play.ejection().detail) == (EjectionReason.EVENT, "ENGINE_DEAD")
    assert not play.is_due()
    play.outliers.recovered("a", play.now_s)
    assert play.is_due()
    assert not play.is_in(), "the probe decides"
    until_s = play.ejection().until_s
    play.outliers.eject("a", EjectionReason.EVENT, play.now_s + 5, "ENGINE_DEAD")
    assert play.ejection().until_s == until_s, "an event does not lengthen an ejection"


Step = Callable[[Play], None]
STEPS: tuple[Step, ...] = (
    lambda play: play.fail(),
    lambda play: play.succeed(),
    lambda play: throttle(play, 3.0, busy=True),
    lambda play: play.unanswered(2),
    lambda play: overtaken(play),
    lambda play: play.outliers.check(play.now_s),
    lambda play: play.outliers.recovered("a", play.now_s),
    lambda play: play.outliers.eject("a", EjectionReason.EVENT, play.now_s, "HANG"),
    lambda play: play.outliers.abandoned("a", play.now_s),
    lambda play: play.outliers.failed("a", ERROR, play.now_s, probe=True),
)


@given(st.lists(st.tuples(st.sampled_from(STEPS), st.floats(0, 40)), max_size=60))
def test_whatever_happens_an_engine_is_in_or_gets_a_probe_within_the_longest_ejection(
    steps: list[tuple[Step, float]],
) -> None:
    play = Play()
    for step, later_s in steps:
        step(play)
        ejection = play.outliers.ejections.get("a")
        if ejection is not None:
            assert not play.is_in()
            assert ejection.until_s - ejection.at_s <= MAX_S
        play.now_s += later_s
    play.outliers.abandoned("a", play.now_s)
    play.now_s += MAX_S + LIMITS.max_pause_s
    play.outliers.progressed("a", play.now_s)
    assert play.is_in() != play.is_due()
    if play.is_due():
        play.probe(good=True)
    assert play.is_in()


@given(st.lists(st.sampled_from(("good", "bad")), min_size=3, max_size=100))
def test_an_engine_is_ejected_exactly_after_three_bad_or_ten_bad_of_twenty(ends: list[str]) -> None:
    play = Play()
    for number, end in enumerate(ends, start=1):
        if end == "good":
            play.succeed()
        else:
            play.fail()
        last = ends[max(0, number - 20) : number]
        often = end == "bad" and len(last) == 20 and last.count("bad") >= 10
        assert play.is_in() == (not often and ends[max(0, number - 3) : number] != ["bad"] * 3)
        assert play.is_in("b")
        if not play.is_in():
            assert play.ejection().reason is ERROR
            assert play.outliers.ejected == {("a", ERROR): 1}
            return
