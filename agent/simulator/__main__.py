"""`python -m agent.simulator`: one simulated vLLM, to try the agent without an engine."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.errors import SettingsInvalid
from agent.simulator.openai_server import run_simulator
from agent.simulator.past_engine import run_with_past
from agent.simulator.scenario import Scenario, load_scenario
from agent.simulator.span_sender import SpanProtocol, SpanTarget
from agent.terminal import echo

app = typer.Typer(add_completion=False)


def _announce(url: str) -> None:
    echo(f"simulator listening on {url} (simulated vLLM, not a real engine)")


@app.command()
def main(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    scenario: Annotated[
        Path | None, typer.Option(help="YAML file; without it, the packaged chat scenario.")
    ] = None,
    otlp: Annotated[
        str | None,
        typer.Option(help="Endpoint for spans; for http/protobuf the full URL with /v1/traces."),
    ] = None,
    protocol: Annotated[SpanProtocol, typer.Option(help="How to send spans.")] = SpanProtocol.GRPC,
    service_name: Annotated[
        str | None, typer.Option(help="service.name of the spans; else OTEL_SERVICE_NAME.")
    ] = None,
    traffic: Annotated[bool, typer.Option(help="Whether the scenario's own requests run.")] = True,
    past: Annotated[
        float | None,
        typer.Option(help="Unix time at which its scenario started; needs --otlp."),
    ] = None,
    access_log: Annotated[bool, typer.Option(help="Write a line for each response.")] = False,
    until_stdin_closes: Annotated[
        bool, typer.Option(help="End at once when stdin is closed, as when its starter is killed.")
    ] = False,
) -> None:
    """Serve a simulated vLLM 0.32: metrics, spans, and the OpenAI routes."""
    if until_stdin_closes:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    if access_log:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    spans = None
    if otlp is not None:
        spans = SpanTarget(endpoint=otlp, protocol=protocol, service_name=service_name)
    try:
        server = {"host": host, "port": port, "traffic": traffic, "access_log": access_log}
        simulator = _simulator(load_scenario(scenario), spans, past, server)
        asyncio.run(_until_terminated(simulator))
    except SettingsInvalid as error:
        echo(str(error), err=True)
        raise typer.Exit(2) from error


def _simulator(
    scenario: Scenario,
    spans: SpanTarget | None,
    past: float | None,
    server: Mapping[str, Any],
) -> Coroutine[Any, Any, None]:
    if past is None or spans is None:
        return run_simulator(scenario, announce=_announce, spans=spans, **server)
    at = {"host": server["host"], "port": server["port"]}
    return run_with_past(scenario, past, announce=_announce, spans=spans, **at)


def _end_with_stdin() -> None:
    # Not `sys.stdin`: its lock would be held when the interpreter ends.
    while os.read(0, 1024):
        pass
    os._exit(0)


async def _until_terminated(simulator: Coroutine[Any, Any, None]) -> None:
    """Run until SIGINT or SIGTERM, then cancel the simulator, which flushes its spans."""
    running = asyncio.ensure_future(simulator)
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, running.cancel)
    with suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    app()
