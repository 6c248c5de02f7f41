from agent.sources.engines.fetch import open_session
from agent.sources.engines.health import HealthProbe
from tests.sources.engines.wire import EngineServer


def status(engine: EngineServer, *, timeout_s: float = 20.0) -> int | None:
    with open_session() as session:
        return HealthProbe(engine.url + "/", session, timeout_s=timeout_s).status()


def test_health_is_the_status_of_the_answer(engine: EngineServer) -> None:
    for code in (200, 503, 302):
        engine.answers("/health", b"", status=code)
        assert status(engine) == code
    assert engine.asked == ["/health"] * 3


def test_an_answer_that_never_ends_has_a_status(engine: EngineServer) -> None:
    engine.drips("/health", b"HTTP/1.1 200 OK\r\n\r\n", b"x")
    assert status(engine) == 200


def test_an_engine_that_gives_no_status_has_no_health(engine: EngineServer) -> None:
    engine.drips("/health", b"HTTP/1.1", b"1")
    assert status(engine, timeout_s=0.3) is None
    engine.answers("/health", b"")
    engine.stop()
    assert status(engine) is None
