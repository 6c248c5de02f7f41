"""Nothing that others wrote steers the terminal that it is printed to."""

import json
import os
import pty
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from subprocess import Popen

import pytest
import yaml
from rich.table import Table
from rich.text import Text

from agent.cli import command
from agent.terminal import TerminalConsole, echo, progress_bar
from tests.outputs.api.serving import open_api
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.real_parts.recording_server import Recorded, recording_server
from tests.real_parts.waiting import eventually
from tests.records.making import objective, record
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

WITHIN_S = 60.0
AGENT = Path(__file__).parents[1] / "agent"
TITLE, CLEAR, C1, OVERRIDE = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202e"
EVIL = f"{TITLE}{CLEAR}{C1}{OVERRIDE}\rname"
# What is left of it.
LEFT = "]0;owned[2J31mname"
# Discovery puts a space for a carriage return.
COLOUR = re.compile("\x1b\\[[0-9;]*m")
LOGGED = re.compile(r"403: \S*31m name")

Printed = Callable[..., str]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Printed:
    """What a command prints, with the sentence of its error."""

    def run(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["goodput-agent", *map(str, arguments)])
        with suppress(SystemExit):
            command()
        return "".join(capfd.readouterr())

    return run


@pytest.fixture
def server() -> Iterator[Recorded]:
    with recording_server() as recorded:
        yield recorded


@pytest.fixture
def engine() -> Iterator[EngineServer]:
    """A vLLM whose model and version have evil names."""
    with EngineServer() as served:
        page = re.sub(rb'model_name="[^"]*"', f'model_name="{EVIL}"'.encode(), body("vllm-0.32.0"))
        served.answers("/metrics", page)
        served.answers("/version", json.dumps({"version": EVIL}).encode())
        served.answers("/v1/models", json.dumps({"data": [{"id": EVIL}]}).encode())
        served.answers("/health", b"")
        yield served


def steering(text: str) -> list[str]:
    return [each for each in text if each not in "\n\t" and unicodedata.category(each) in "CcCf"]


def test_checks_of_an_engine(printed: Printed, engine: EngineServer, tmp_path: Path) -> None:
    config = tmp_path / "agent.yml"
    config.write_text(
        yaml.safe_dump(
            {"engines": [{"name": "chat-0", "url": engine.url}], "listen": {"port": free_port()}}
        )
    )
    facts = printed("config", "check", config, "--engines")
    assert LEFT in facts
    audit = printed("audit", engine.url, "--config", config)
    assert "vllm" in audit
    assert steering(facts + audit) == []


@pytest.mark.parametrize("shape", ["text", "markdown", "html", "csv"])
def test_a_report_and_its_file(printed: Printed, tmp_path: Path, shape: str) -> None:
    file = tmp_path / "report"
    with open_api(tmp_path) as api:
        now = api.agent.now
        records = [record(n, tenant=EVIL, model=EVIL, ended_at=now - 1) for n in range(5)]
        api.store(records, [objective()])
        asked = ("--format", shape, *(["--statement"] if shape == "csv" else []))
        shown = printed("report", "--url", api.url, *asked)
        printed("report", "--url", api.url, *asked, "--output", file)
    assert "name" in shown
    assert steering(shown + file.read_text(encoding="utf-8")) == []


def test_an_estimate_and_errors(printed: Printed, tmp_path: Path, server: Recorded) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": EVIL, "architectures": [EVIL]}))
    server.status, server.body = 500, json.dumps({"detail": EVIL}).encode()
    shown = printed("estimate", config)
    shown += printed("report", "--url", server.url)
    assert LEFT in shown
    assert steering(shown) == []


def test_rich_prints_names_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    table = Table(EVIL, title=EVIL)
    table.add_row(Text(EVIL))
    markup = "[link=http://evil.example][bold]model[/] :smile:"
    for each in (table, EVIL, markup):
        TerminalConsole(width=100).print(each)
    shown = capfd.readouterr().out
    assert shown.count(LEFT) == 4
    assert steering(shown) == []
    assert markup in shown


def test_a_name_that_is_no_unicode_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    echo(os.fsdecode(b"model-\xff.json"))
    assert capfd.readouterr().out == "model-.json\n"


def test_everything_is_printed_by_this_module() -> None:
    by_others = re.compile(r"(typer|click)\.echo|[^l]Console\(|sys\.std(out|err)\.write")
    places = [
        f"{path.relative_to(AGENT)}: {line.strip()}"
        for path in AGENT.rglob("*.py")
        if path.name != "terminal.py"
        for line in path.read_text(encoding="utf-8").splitlines()
        if by_others.search(line)
    ]
    assert places == []


def discovering(folder: Path, server: Recorded) -> Sequence[str]:
    """The command of an agent whose API server refuses it with a message of its own."""
    (folder / "token").write_text("token")
    (folder / "ca.crt").touch()
    server.status, server.body = 403, json.dumps({"message": EVIL}).encode()
    kubernetes = {"selector": "a=b", "namespaces": ["llm"], "api": server.url}
    settings = {
        "engines_from": {"kubernetes": {**kubernetes, "service_account": str(folder)}},
        "listen": {"port": free_port()},
        "otlp": {"grpc": None, "http": None},
        "storage": {"file": str(folder / "goodput.db")},
    }
    config = folder / "agent.yml"
    config.write_text(yaml.safe_dump(settings))
    return [sys.executable, "-m", "agent", "run", "--config", str(config)]


@pytest.mark.slow
def test_the_log_in_a_file(tmp_path: Path, server: Recorded) -> None:
    log = tmp_path / "agent.log"
    with ServerProcess(discovering(tmp_path, server), log):
        eventually(lambda: LOGGED.search(log.read_text()), within_s=WITHIN_S, what="a refusal")
    assert steering(log.read_text()) == []


@pytest.mark.slow
def test_the_log_on_a_terminal(tmp_path: Path, server: Recorded) -> None:
    reading, writing = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "300"}
    shown = ""
    with Popen(discovering(tmp_path, server), stderr=writing, env=environment) as agent:
        os.close(writing)
        # A terminal that all its writers have closed is an error on Linux.
        with suppress(OSError):
            while piece := os.read(reading, 65_536):
                shown += piece.decode(errors="replace")
                if LOGGED.search(COLOUR.sub("", shown)):
                    agent.terminate()
    os.close(reading)
    assert LOGGED.search(COLOUR.sub("", shown))
    assert [each for each in (TITLE, CLEAR, C1, OVERRIDE) if each in shown] == []


def test_a_terminal_shows_what_is_done_and_how_much_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with progress_bar("comparing", 4) as done:
            done()
    shown = read_to_its_end(reading)
    os.close(reading)
    assert "comparing" in shown
    assert "25%" in shown


def read_to_its_end(terminal: int) -> str:
    """What was written to a terminal that is closed; Linux reports its end as an error."""
    found = b""
    with suppress(OSError):
        while piece := os.read(terminal, 65_536):
            found += piece
    return found.decode()


def test_a_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with progress_bar("comparing", 4) as done:
        done()
    assert file.getvalue() == ""
