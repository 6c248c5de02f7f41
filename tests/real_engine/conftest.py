"""One real vLLM for all tests of this folder; each module watches it with an agent of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real_engine.proxy_clients import ALLOWED_ORIGIN
from tests.real_engine.watching import ENGINE, RUNNING, STEP_TOKENS
from tests.real_parts.agent_process import AgentPorts
from tests.real_parts.bench import BenchmarkRunner
from tests.real_parts.collector import Collector
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm, plugin_environment

pytest.register_assert_rewrite("tests.real_engine.front_requests")

# Two blocks for requests, because one is always empty: one request of the greatest length.
BAD_BLOCKS, BAD_LENGTH = 3, 256
# Every flag that some test needs, because a start takes long.
ENGINE_OPTIONS = (
    *("--enable-mfu-metrics", "--enable-prompt-tokens-details"),
    "--enable-per-request-metrics",
    *("--max-num-batched-tokens", str(STEP_TOKENS), "--max-num-seqs", str(RUNNING)),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--allowed-origins", json.dumps([ALLOWED_ORIGIN])),
    # Random weights may put spaces for ever where a grammar allows them.
    "--structured-outputs-config",
    json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    # For responses that are larger than what networks hold.
    *("--max-logprobs", "200"),
)
# This module judges the time of steps, which is to be that of a user's engine.
CAUSES_MODULE = "test_causes.py"
# This module ends the engines.
LAST_MODULE = "test_failures.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--after FILE` makes the tests of causes wait while others hold a lock on the file."""
    parser.addoption("--after", type=Path, help="a file that others lock while they run")
    parser.addoption("--published", action="store_true", help="causes as right as the docs say")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the module that ends the engines after all others."""
    items.sort(key=lambda item: item.path.name == LAST_MODULE)


@pytest.fixture(scope="session")
def ports() -> AgentPorts:
    """The ports of every agent of these tests: a running engine sends its spans there."""
    return AgentPorts.free()


@pytest.fixture(scope="session")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchmarkRunner]:
    """vLLM's benchmark, loaded once."""
    with BenchmarkRunner(tmp_path_factory.mktemp("benchmark")) as runner:
        yield runner


@pytest.fixture(scope="session")
def plugin_socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine's plugin sends its records, whether an agent listens or not."""
    return tmp_path_factory.mktemp("socket") / "vllm.sock"


@pytest.fixture(scope="session")
def engine(
    request: pytest.FixtureRequest,
    ports: AgentPorts,
    plugin_socket: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Vllm]:
    """The real vLLM, sending its spans over gRPC until a test restarts it otherwise.

    It starts while the benchmark, if one is asked for, loads on another core.
    """
    if any("benchmark" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("benchmark")
    folder = tmp_path_factory.mktemp("vllm")
    with Vllm(
        folder,
        port=free_port(),
        spans=SpanExport.grpc(ports.grpc),
        service=ENGINE,
        extra=ENGINE_OPTIONS,
        environment={
            **plugin_environment(folder / "plugin", plugin_socket, middleware=False),
            # The route that empties the prefix cache.
            "VLLM_SERVER_DEV_MODE": "1",
        },
        busy_loops=any(item.path.name == CAUSES_MODULE for item in request.session.items),
    ) as running:
        yield running


@pytest.fixture(scope="session")
def bad_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """A second vLLM, started badly: hardly any cache, none of it for prefixes, and no spans."""
    with Vllm(
        tmp_path_factory.mktemp("bad"),
        port=free_port(),
        spans=None,
        extra=(
            "--no-enable-prefix-caching",
            *("--num-gpu-blocks-override", str(BAD_BLOCKS), "--max-model-len", str(BAD_LENGTH)),
        ),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """A receiver of the spans that the agent forwards."""
    with Collector() as running:
        yield running
