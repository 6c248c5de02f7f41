"""The commands: their output and exit codes."""

import gc
import json
import logging
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import yaml
from sqlalchemy import text

from agent import __version__
from agent.__main__ import start
from agent.cli import command
from agent.settings import load
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision
from agent.terminal import LogFormat, LogLevel, log_to_stderr
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.settings.nasty_documents import NASTY
from tests.store.making import request, rollup_bytes, store

SCRIPT = Path(sys.executable).parent / "goodput-agent"
ENDS_WITHIN_S = 60.0


class Ended(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """Runs the entry point of the console script in this process and a new folder."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("GOODPUT_")]:
        monkeypatch.delenv(name)

    def called(*arguments: str, **environment: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["goodput-agent", *arguments])
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            command()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Ended(code or 0, *capsys.readouterr())

    return called


def ends(folder: Path, *arguments: str, **environment: str) -> Ended:
    """An agent that may go on if it does not refuse, in a process of its own."""
    ports = AgentPorts.free()
    everywhere = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__FILE": str(folder / "goodput.db"),
        **environment,
    }
    log = folder / "log"
    command_line = [sys.executable, "-m", "agent", "run", *arguments]
    process = ServerProcess(command_line, log, environment=everywhere)
    return Ended(process.wait(within_s=ENDS_WITHIN_S), "", log.read_text())


def run(*command_line: str | Path, folder: Path, **environment: str) -> Ended:
    """Run a command in its own process until it ends."""
    ended = subprocess.run(
        list(map(str, command_line)),
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=ENDS_WITHIN_S,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


def error_lines(ended: Ended) -> list[str]:
    """The error lines of a refusal with exit code 2, without a traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.out + ended.err
    assert ended.out == ""
    assert ended.err.startswith("goodput-agent: ")
    return ended.err.removeprefix("goodput-agent: ").splitlines()


# Help


def test_help_and_completion_wait_for_no_server_and_no_database() -> None:
    heavy = {"alembic", "apscheduler", "fastapi", "grpc", "opentelemetry", "requests", "sqlalchemy"}
    code = f"import sys, agent.cli; print(*{heavy} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.slow
def test_numpy_gets_no_threads_unless_a_user_wants_them() -> None:
    code = """if True:
        import os, sys
        from contextlib import suppress
        from agent.__main__ import start
        sys.argv = ["goodput-agent", "version"]
        with suppress(SystemExit):
            start()
        import numpy
        print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")))
    """
    name = "OPENBLAS_NUM_THREADS"
    others = {key: value for key, value in os.environ.items() if key != name}
    for chosen, threads in (({}, "1"), ({name: "2"}, "2")):
        found = subprocess.run(
            [sys.executable, "-c", code], env={**others, **chosen}, capture_output=True, check=True
        )
        *_, used, started = found.stdout.decode().split()
        assert used == threads
        assert int(started) <= int(threads)


def test_no_command_at_all_and_both_options_print_the_help(call: Call) -> None:
    ended = call()
    assert ended.code == 2
    shown = call("--help").out
    assert "Usage: goodput-agent" in shown
    assert shown.strip() in ended.out + ended.err
    assert call("-h").out == shown


def test_the_version_is_that_of_the_package_for_the_script_and_the_module(
    call: Call, tmp_path: Path
) -> None:
    expected = Ended(0, f"{__version__}\n", "")
    assert call("--version") == expected
    assert json.loads(call("version", "--json").out) == {"version": __version__}
    assert run(SCRIPT, "version", folder=tmp_path) == expected
    assert run(sys.executable, "-m", "agent", "version", folder=tmp_path) == expected


@pytest.mark.parametrize("wrong", [["rum"], ["run", "--engin", "x"], ["db"], ["db", "downgrade"]])
def test_a_command_that_does_not_exist_is_refused(call: Call, wrong: list[str]) -> None:
    ended = call(*wrong)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_a_start_searches_nothing_that_it_imports_for_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searching = []

    class ImportedCommands(ModuleType):
        @property
        def command(self) -> Callable[[], None]:
            searching.append(gc.isenabled())
            return lambda: searching.append(gc.isenabled())

    monkeypatch.setitem(sys.modules, "agent.cli", ImportedCommands("agent.cli"))
    frozen = gc.get_freeze_count()
    start()
    assert searching == [False, True]
    assert gc.get_freeze_count() > frozen


# check


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("--engine http://h:8000 --send-request", "audit http://h:8000 --send-request"),
        ("--config a.yml --engine=http://h:8000", "audit http://h:8000 --config a.yml"),
        ("--config a.yml --engines", "config check a.yml --engines"),
        ("--engine http://u:s3cret@h", "audit http://u:***@h"),
        ("", "config check"),
        ("--help", "config check --help"),
    ],
)
def test_the_old_name_of_a_check_says_the_new_one(call: Call, words: str, command: str) -> None:
    (line,) = error_lines(call("check", *words.split()))
    assert line.replace("'", "") == f"check is now `goodput-agent {command}`"


def test_check_prints_the_settings_in_force_as_a_valid_file(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("engines: [{name: a, url: 'http://h:8000'}]\nstorage: {keep_requests: 3d}\n")
    ended = call("config", "check", str(file), GOODPUT_LISTEN__PORT="8080")
    assert (ended.code, ended.err) == (0, "")
    shown = tmp_path / "shown.yml"
    shown.write_text(ended.out)
    in_force = load(file, {"GOODPUT_LISTEN__PORT": "8080"})
    assert load(shown, {}).shown() == in_force.shown()


def test_check_prints_the_settings_as_json_as_well_without_passwords(call: Call) -> None:
    ended = call("config", "check", GOODPUT_STORAGE__PUBLISH_TO="postgresql://u:s3cret@h/d")
    as_json = call("config", "check", "--json")
    assert (as_json.code, as_json.err) == (0, "")
    assert json.loads(as_json.out) == yaml.safe_load(ended.out)
    assert "postgresql://u:***@h/d" in ended.out
    assert "s3cret" not in ended.out + ended.err + as_json.out


def test_check_lists_every_problem(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("colour: green\nlisten: {port: no}\nengines: [{name: a}]\n")
    lines = error_lines(call("config", "check", str(file), GOODPUT_OTLP__GRPC="nowhere"))
    assert {tuple(line.split(": ")[:2]) for line in lines} == {
        (f"{file}:1", "colour"),
        (f"{file}:2", "listen.port"),
        (f"{file}:3", "engines[0].url"),
        ("GOODPUT_OTLP__GRPC", "otlp.grpc"),
    }


@pytest.mark.parametrize("url", ["sqlite:///shared.db", "mysql://h/d", "goodput.db"])
def test_check_refuses_a_database_that_run_would_refuse(call: Call, url: str) -> None:
    (line,) = error_lines(call("config", "check", GOODPUT_STORAGE__PUBLISH_TO=url))
    assert line.startswith("GOODPUT_STORAGE__PUBLISH_TO: storage.publish_to: ")


@pytest.mark.parametrize("what", ["month 13", "deep lists"])
def test_a_mistake_in_the_file_ends_a_run_with_one_sentence(
    call: Call, tmp_path: Path, what: str
) -> None:
    text, begin = NASTY[what]
    assert isinstance(text, str)
    (tmp_path / "agent.yml").write_text(text)
    (line,) = error_lines(call("run", "--config", "agent.yml"))
    assert line.startswith(f"agent.yml{begin}")


@pytest.mark.parametrize("value", ["2026-13-01", "9" * 5000, "[" * 5000])
def test_a_mistake_in_a_variable_ends_a_check_with_one_sentence(call: Call, value: str) -> None:
    (line,) = error_lines(call("config", "check", GOODPUT_LISTEN__PORT=value))
    assert line.startswith("GOODPUT_LISTEN__PORT: ")
    assert len(line) < 300


@pytest.mark.parametrize("name", ["run", "audit http://h:1", "serve", "report"])
def test_a_pipe_without_a_writer_is_no_settings_file(call: Call, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "agent.yml")
    (line,) = error_lines(call(*name.split(), "--config", "agent.yml"))
    assert line == "agent.yml: cannot be read: Is a named pipe; name a regular file"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["security.read_tokens", "security.tls_certificate", "tls.ca"])
def test_a_pipe_is_no_file_of_a_setting(tmp_path: Path, setting: str) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    given = {f"GOODPUT_{setting.replace('.', '__').upper()}": str(pipe)}
    if "tls_certificate" in setting:
        given["GOODPUT_SECURITY__TLS_KEY"] = str(pipe)
    (line,) = error_lines(ends(tmp_path, "--engine", "http://h:1", **given))
    assert line.startswith(f"{setting}: {pipe} ")
    assert "Is a named pipe; name a regular file" in line


@pytest.mark.parametrize("name", ["audit http://h:1", "run", "demo"])
def test_a_missing_file_is_named(call: Call, name: str) -> None:
    (line,) = error_lines(call(*name.split(), "--config", "missing.yml"))
    assert line.startswith("missing.yml: cannot be read: ")


# run


@pytest.mark.parametrize(
    ("words", "given", "problems"),
    [
        ("run", {}, ["no engine is set; give --engine http://host:port, or a file with --config"]),
        (
            "run --engine h:8000",
            {},
            ["--engine: 'h:8000' is not the URL of a server; write http://host:port"],
        ),
        (
            "run --engine http://h",
            {"GOODPUT_COLOUR": "green", "GOODPUT_NAME": "''"},
            ["GOODPUT_COLOUR", "GOODPUT_NAME"],
        ),
        (
            "demo",
            {"GOODPUT_OTLP__GRPC": "null", "GOODPUT_OTLP__HTTP": "null"},
            ["otlp: the demo sends spans; set otlp.grpc or otlp.http"],
        ),
    ],
)
def test_every_problem_of_the_settings_of_a_start_is_named(
    call: Call, words: str, given: dict[str, str], problems: list[str]
) -> None:
    lines = sorted(error_lines(call(*words.split(), **given)))
    for line, problem in zip(lines, problems, strict=True):
        assert line.startswith(problem)


def test_run_refuses_engines_from_two_places(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("engines: [{name: a, url: 'http://h:8000'}]\n")
    both = "--engine: the settings have engines as well; remove one of them"
    assert error_lines(call("run", "--engine", "http://h", "--config", str(file))) == [both]
    assert error_lines(call("run", "--engine", "http://h", GOODPUT_ENGINES__0__URL="http://i")) == [
        both
    ]


@pytest.mark.parametrize(
    ("setting", "variable", "address"),
    [
        ("listen", "GOODPUT_LISTEN__PORT", "{port}"),
        ("otlp.grpc", "GOODPUT_OTLP__GRPC", "127.0.0.1:{port}"),
        ("otlp.http", "GOODPUT_OTLP__HTTP", "127.0.0.1:{port}"),
    ],
)
def test_a_port_in_use_is_named(tmp_path: Path, setting: str, variable: str, address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = {variable: address.format(port=port)}
        ended = ends(tmp_path, "--engine", f"http://127.0.0.1:{free_port()}", **given)
    last = last_line(ended)
    assert last.startswith(f"goodput-agent: {setting}: cannot listen on 127.0.0.1:{port}")
    assert "choose another" in last


def test_a_host_that_is_not_this_machine_is_named(tmp_path: Path) -> None:
    given = {"GOODPUT_LISTEN__HOST": "192.0.2.1", "GOODPUT_SECURITY__INSECURE": "true"}
    ended = ends(tmp_path, "--engine", f"http://127.0.0.1:{free_port()}", **given)
    assert last_line(ended).startswith("goodput-agent: listen: cannot listen on 192.0.2.1:")


def last_line(ended: Ended) -> str:
    assert ended.code == 2
    assert "Traceback" not in ended.err
    return ended.err.splitlines()[-1]


# The database


def test_upgrade_creates_the_database_and_prints_the_revisions(call: Call) -> None:
    newest = newest_revision()
    upgraded = json.loads(call("db", "upgrade", "--json").out)
    assert upgraded == {"file": {"revision": newest, "was": None}, "publish_to": None}
    again = f"the agent's file is at revision {newest} (was {newest})\n"
    assert call("db", "upgrade").out == again
    with sqlite3.connect("goodput.db") as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert {"requests", "events", "objectives", "engine_samples", "rollups"} <= tables


def test_upgrade_migrates_the_shared_database_as_well(call: Call, postgres_url: str) -> None:
    newest = newest_revision()
    shown = call("db", "upgrade", GOODPUT_STORAGE__PUBLISH_TO=postgres_url).out
    assert shown.splitlines() == [
        f"the agent's file is at revision {newest} (was None)",
        f"the shared database is at revision {newest} (was None)",
    ]
    as_json = call("db", "upgrade", "--json", GOODPUT_STORAGE__PUBLISH_TO=postgres_url).out
    at_newest = {"revision": newest, "was": newest}
    assert json.loads(as_json) == {"file": at_newest, "publish_to": at_newest}


def test_a_database_that_a_command_makes_is_for_its_user_alone(call: Call, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        call("db", "upgrade")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("goodput.db*")} == {0o600}


def test_upgrade_reads_the_file_and_the_environment(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("storage: {file: named.db}")
    assert call("db", "upgrade", "--config", str(file)).code == 0
    assert call("db", "upgrade", GOODPUT_STORAGE__FILE="other.db").code == 0
    assert {path.name for path in tmp_path.glob("*.db")} == {"named.db", "other.db"}


REVISIONS = {"newer version": "9999", "no released version": "0022"}


@pytest.mark.parametrize("kind", ["no database", "missing folder", *REVISIONS])
def test_an_unusable_database_is_reported_in_one_line(
    call: Call, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / ("missing/goodput.db" if kind == "missing folder" else "goodput.db")
    if kind == "no database":
        path.write_text("Dear diary, this is no database, however long it may be." * 100)
    if kind in REVISIONS:
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
            database.execute("INSERT INTO alembic_version VALUES (?)", (REVISIONS[kind],))
    (line,) = error_lines(call("db", "upgrade", GOODPUT_STORAGE__FILE=str(path)))
    assert line.startswith("the database ")


def test_an_unreachable_database_server_is_reported_without_the_password(
    call: Call,
) -> None:
    url = f"postgresql://u:s3cret@127.0.0.1:{free_port()}/d"
    (line,) = error_lines(call("db", "upgrade", GOODPUT_STORAGE__PUBLISH_TO=url))
    assert "Connection refused" in line
    assert "s3cret" not in line


def days(first: int, end: int) -> list[str]:
    """The options for days relative to today."""
    today = datetime.now(UTC).date()
    dates = [(today + timedelta(days=day)).isoformat() for day in (first, end)]
    return ["--from", dates[0], "--until", dates[1]]


def test_rollups_are_rebuilt_from_the_rows(call: Call, tmp_path: Path) -> None:
    assert call("db", "upgrade").code == 0
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    now = time.time()
    store(engine, [request(n, ended_at=now - n * 3600) for n in range(20)])
    before = rollup_bytes(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM rollups"))
    assert rollup_bytes(engine) == {}
    ended = call("db", "rebuild", *days(-2, 2), GOODPUT_NAME="agent-0")
    assert (ended.code, ended.out) == (0, "rebuilt the rollups of agent-0: 4 days\n")
    assert rollup_bytes(engine) == before
    rebuilt = json.loads(call("db", "rebuild", *days(-1, 1), "--json", GOODPUT_NAME="a").out)
    assert rebuilt == {"agent": "a", "days": 2}
    engine.dispose()


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        (days(-6, 1), "--from: requests of days before"),
        (days(0, 0), "--until: must be a later day than --from"),
        (["--from", "0001-01-01", "--until", "9999-12-31"], "--from: requests of days before"),
        ([*days(-1, 0)[:3], "9999-12-31"], "--until: lies in the future"),
    ],
)
def test_days_that_cannot_be_rebuilt_are_refused(
    call: Call, chosen: list[str], complaint: str
) -> None:
    ended = call("db", "rebuild", *chosen)
    assert ended.code == 2
    (line,) = error_lines(ended)
    assert line.startswith(complaint)


def test_days_that_the_file_no_longer_has_are_not_rebuilt(call: Call) -> None:
    variables = {
        "GOODPUT_STORAGE__PUBLISH_TO": "postgresql://h/d",
        "GOODPUT_STORAGE__KEEP_IN_FILE": "2d",
    }
    (line,) = error_lines(call("db", "rebuild", *days(-3, 0), **variables))
    assert line.startswith("--from: requests of days before")
    assert line.endswith("have expired in goodput.db, which has them for 2d (storage.keep_in_file)")


@pytest.mark.parametrize(
    "listen", ["9470", ":9470", "localhost:", "localhost:http", "localhost:99999"]
)
def test_an_address_that_nobody_can_listen_on_is_one_sentence(call: Call, listen: str) -> None:
    ended = call("run", "--engine", "http://127.0.0.1:1", "--listen", listen)
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert "listen" in ended.err


QUIET = {"GOODPUT_OTLP__GRPC": "null", "GOODPUT_OTLP__HTTP": "null"}


def test_engines_and_the_address_of_the_page_are_options(tmp_path: Path) -> None:
    port, dead = free_port(), [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    engines = [option for url in dead for option in ("--engine", url)]
    command_line = ["run", *engines, "--listen", f"127.0.0.1:{port}", "--log-format", "json"]
    environment = {**QUIET, "GOODPUT_STORAGE__FILE": str(tmp_path / "goodput.db")}
    with AgentProcess(command_line, tmp_path, port, environment) as agent:
        named = {each["name"] for each in agent.api.items("/api/v1/engines", {})}
        assert named == {"engine-0", "engine-1"}
        agent.stop()
        lines = [json.loads(line) for line in agent.log().splitlines()]
    assert lines[0].keys() == {"time", "level", "logger", "message"}


@pytest.mark.parametrize(("level", "lines"), [("info", True), ("error", False)])
def test_the_log_has_lines_from_its_level_on(
    capsys: pytest.CaptureFixture[str], level: str, *, lines: bool
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers.clear()
    log_to_stderr(LogLevel(level), LogFormat.TEXT)
    logging.getLogger("agent.app").info("a start")
    root.handlers[:], root.level = before
    assert ("a start" in capsys.readouterr().err) is lines
