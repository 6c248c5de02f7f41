from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, start_http_server

from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, complaints_about, scrape_of
from tests.real_parts.waiting import eventually

CLEAN_PAGE = "# HELP seen_total Things seen.\n# TYPE seen_total counter\nseen_total 1\n"


def test_exemplars_of_a_scraped_page_can_be_queried(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    Counter("seen", "Things seen.", registry=registry).inc(3, {"trace_id": "abc"})
    port = free_port()
    server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    with Prometheus(tmp_path, scrape_of("page", f"http://127.0.0.1:{port}")) as prometheus:
        found = eventually(
            lambda: prometheus.query("seen_total"), within_s=30, what="the scraped counter"
        )
        exemplars = prometheus.exemplars("seen_total")
    server.shutdown()
    server.server_close()
    thread.join()
    assert found[0]["value"][1] == "3"
    assert [exemplar["labels"] for exemplar in exemplars] == [{"trace_id": "abc"}]


def test_promtool_accepts_a_clean_exposition() -> None:
    assert complaints_about(CLEAN_PAGE) == []


def test_promtool_names_the_metric_that_breaks_the_rules() -> None:
    complaints = complaints_about(CLEAN_PAGE.replace("seen_total", "seen_milliseconds"))
    assert any("seen_milliseconds" in complaint for complaint in complaints)
