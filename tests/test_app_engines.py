"""What an engine is judged by, as its settings say."""

from agent.app.engines import limits_of
from agent.settings import EngineSettings
from tests.analysis.failure_polls import (
    ALL,
    CHATTER,
    FATAL_LINE,
    GPU,
    OOM_LINE,
    SILENCE,
    Watched,
    host,
    kinds,
    said,
)

RARE_S = 60.0


def looked_at_every(interval_s: float) -> Watched:
    told = {"name": "chat", "url": "http://127.0.0.1:8000", "scrape_interval": f"{interval_s}s"}
    return Watched(limits_of(EngineSettings.model_validate(told)))


def test_an_engine_that_is_looked_at_rarely_still_dies_of_what_its_log_said_before() -> None:
    engine = looked_at_every(RARE_S)
    for log in (CHATTER, CHATTER, said(OOM_LINE)):
        assert engine.works(seen=host(ALL, log=log), after_s=RARE_S) == ()
    died = [
        event
        for log in (said(FATAL_LINE), SILENCE)
        for event in engine.fails(seen=host((), log=log), after_s=RARE_S)
    ]
    assert kinds(died) == ["CUDA_OOM", "UNREACHABLE"]


def test_what_goes_on_is_told_once_however_rare_the_looks() -> None:
    engine = looked_at_every(RARE_S)
    lost = [
        event
        for _ in range(6)
        for event in engine.works(problems={GPU: "gpu_lost"}, after_s=RARE_S)
    ]
    assert kinds(lost) == ["GPU_FAULT"]


def test_the_usual_interval_leaves_the_usual_limits() -> None:
    limits = limits_of(EngineSettings(name="chat", url="http://127.0.0.1:8000"))
    assert (limits.clue_s, limits.quiet_s) == (30.0, 60.0)
