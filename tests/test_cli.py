"""The commands: what they say, where they say it, and with which exit code they end."""

import os
import re
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from sqlalchemy import text

from agent import __version__
from agent.cli import command
from agent.settings import load
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision
from tests.real_parts.agent_process import AgentPorts
from tests.real_parts.ports import free_port
from tests.store.making import request, rollup_bytes, store

SCRIPT = Path(sys.executable).parent / "goodput-agent"
ENDS_WITHIN_S = 60.0
COMMANDS = ("run", "demo", "check", "db", "estimate", "render", "version")


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


Call = Callable[..., Ended]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """What the console script calls, in a folder of its own and in this process."""
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


def run(*command_line: str | Path, folder: Path, **environment: str) -> Ended:
    """A command in a process of its own, that ends by itself."""
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


def said(ended: Ended) -> list[str]:
    """The lines of a refusal: exit code 2, the program's name, and no traceback."""
    assert ended.code == 2, ended
    assert "Traceback" not in ended.out + ended.err
    assert ended.out == ""
    assert ended.err.startswith("goodput-agent: ")
    return ended.err.removeprefix("goodput-agent: ").splitlines()


# Help


def test_help_names_every_command(call: Call) -> None:
    told = call("--help")
    assert told.code == 0
    assert all(re.search(rf"^\W*{name}\s", told.out, re.MULTILINE) for name in COMMANDS)


def test_no_command_at_all_is_answered_with_the_help(call: Call) -> None:
    told = call()
    assert told.code == 2
    assert "Usage: goodput-agent" in told.out + told.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(call: Call, name: str) -> None:
    told = call(name, "--help")
    assert told.code == 0
    assert f"Usage: goodput-agent {name}" in told.out


def test_the_version_is_that_of_the_package(call: Call) -> None:
    assert call("version") == Ended(0, f"{__version__}\n", "")


@pytest.mark.parametrize("wrong", [["rum"], ["run", "--engin", "x"], ["db"], ["db", "downgrade"]])
def test_a_command_that_does_not_exist_is_refused(call: Call, wrong: list[str]) -> None:
    told = call(*wrong)
    assert told.code == 2
    assert "Traceback" not in told.err


def test_the_script_and_the_module_are_the_same_program(tmp_path: Path) -> None:
    by_script = run(SCRIPT, "check", folder=tmp_path)
    by_module = run(sys.executable, "-m", "agent", "check", folder=tmp_path)
    assert by_script == by_module
    assert by_script.code == 0
    assert yaml.safe_load(by_script.out)["listen"]["port"] == 9470


# check


def test_check_shows_what_is_in_force_so_that_it_can_be_read_again(
    call: Call, tmp_path: Path
) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("engines: [{name: a, url: 'http://h:8000'}]\nstorage: {keep_requests: 3d}\n")
    told = call("check", "--config", str(file), GOODPUT_LISTEN__PORT="8080")
    assert (told.code, told.err) == (0, "")
    shown = tmp_path / "shown.yml"
    shown.write_text(told.out)
    in_force = load(file, {"GOODPUT_LISTEN__PORT": "8080"})
    assert load(shown, {}).shown() == in_force.shown()


def test_check_masks_passwords(call: Call) -> None:
    told = call("check", GOODPUT_STORAGE__URL="postgresql://u:s3cret@h/d")
    assert "postgresql://u:***@h/d" in told.out
    assert "s3cret" not in told.out + told.err


def test_check_lists_every_problem(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("colour: green\nlisten: {port: no}\nengines: [{name: a}]\n")
    lines = said(call("check", "--config", str(file), GOODPUT_OTLP__GRPC="nowhere"))
    assert {line.partition(":")[0] for line in lines} == {
        "colour",
        "listen.port",
        "engines[0].url",
        "otlp.grpc",
    }


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://h/d", "goodput.db"])
def test_check_refuses_a_database_that_run_would_refuse(call: Call, url: str) -> None:
    (line,) = said(call("check", GOODPUT_STORAGE__URL=url))
    assert line.startswith("storage.url: ")


@pytest.mark.parametrize("name", ["check", "run", "demo"])
def test_a_file_that_is_not_there_is_named(call: Call, name: str) -> None:
    (line,) = said(call(name, "--config", "missing.yml"))
    assert line.startswith("missing.yml: cannot be read: ")


# run


def test_run_asks_for_an_engine(call: Call) -> None:
    (line,) = said(call("run"))
    assert line == "no engine is set; give --engine http://host:port, or a file with --config"


def test_run_refuses_what_is_no_url(call: Call) -> None:
    (line,) = said(call("run", "--engine", "h:8000"))
    assert line == "engines[0].url: 'h:8000' is no URL of a server; write http://host:port"


def test_run_lists_every_problem_of_its_settings(call: Call) -> None:
    lines = said(call("run", "--engine", "http://h", GOODPUT_COLOUR="green", GOODPUT_NAME="''"))
    assert sorted(line.partition(":")[0] for line in lines) == ["GOODPUT_COLOUR", "name"]


def test_run_takes_its_engines_from_one_place(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("engines: [{name: a, url: 'http://h:8000'}]\n")
    both = "--engine: the settings have engines as well; remove one of them"
    assert said(call("run", "--engine", "http://h", "--config", str(file))) == [both]
    assert said(call("run", "--engine", "http://h", GOODPUT_ENGINES__0__URL="http://i")) == [both]


def environment(folder: Path, ports: AgentPorts) -> dict[str, str]:
    return {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__URL": f"sqlite:///{folder / 'goodput.db'}",
    }


@pytest.mark.parametrize(
    ("setting", "taken"), [("listen", "listen"), ("otlp.grpc", "grpc"), ("otlp.http", "http")]
)
def test_a_port_that_is_taken_is_named(tmp_path: Path, setting: str, taken: str) -> None:
    ports = AgentPorts.free()
    port = getattr(ports, taken)
    with socket.create_server(("127.0.0.1", port)):
        told = run(
            *(sys.executable, "-m", "agent", "run", "--engine", f"http://127.0.0.1:{free_port()}"),
            folder=tmp_path,
            **environment(tmp_path, ports),
        )
    assert told.code == 2
    assert "Traceback" not in told.err
    last = told.err.splitlines()[-1]
    assert last.startswith(f"goodput-agent: {setting}: cannot listen on 127.0.0.1:{port}")
    assert "choose another" in last


def test_a_host_that_is_not_this_machine_is_named(tmp_path: Path) -> None:
    told = run(
        *(SCRIPT, "run", "--engine", f"http://127.0.0.1:{free_port()}"),
        folder=tmp_path,
        **environment(tmp_path, AgentPorts.free()),
        GOODPUT_LISTEN__HOST="192.0.2.1",
    )
    assert told.code == 2
    assert "Traceback" not in told.err
    assert "goodput-agent: listen: cannot listen on 192.0.2.1:" in told.err


# The database


def test_upgrade_makes_the_database_and_says_from_where_to_where(call: Call) -> None:
    newest = newest_revision()
    assert call("db", "upgrade").out == f"the database is at revision {newest} (was None)\n"
    assert call("db", "upgrade").out == f"the database is at revision {newest} (was {newest})\n"
    with sqlite3.connect("goodput.db") as database:
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
    assert {"requests", "events", "objectives", "engine_samples", "rollups"} <= tables


def test_upgrade_takes_the_file_and_the_environment(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("storage: {url: 'sqlite:///named.db'}")
    assert call("db", "upgrade", "--config", str(file)).code == 0
    assert call("db", "upgrade", GOODPUT_STORAGE__URL="sqlite:///other.db").code == 0
    assert {path.name for path in tmp_path.glob("*.db")} == {"named.db", "other.db"}


@pytest.mark.parametrize("arguments", [["db", "upgrade"], ["run", "--engine", "http://h"]])
@pytest.mark.parametrize("kind", ["no database", "missing folder", "newer version"])
def test_a_database_that_cannot_be_used_is_a_sentence(
    call: Call, tmp_path: Path, kind: str, arguments: list[str]
) -> None:
    path = tmp_path / ("missing/goodput.db" if kind == "missing folder" else "goodput.db")
    if kind == "no database":
        path.write_text("Dear diary, this is no database, however long it may be." * 100)
    if kind == "newer version":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
            database.execute("INSERT INTO alembic_version VALUES ('9999')")
    (line,) = said(call(*arguments, GOODPUT_STORAGE__URL=f"sqlite:///{path}"))
    assert line.startswith("the database ")


def test_a_database_server_that_does_not_answer_is_a_sentence_without_the_password(
    call: Call,
) -> None:
    url = f"postgresql://u:s3cret@127.0.0.1:{free_port()}/d"
    (line,) = said(call("db", "upgrade", GOODPUT_STORAGE__URL=url))
    assert "Connection refused" in line
    assert "s3cret" not in line


def days(first: int, end: int) -> list[str]:
    """The options for days counted from today on."""
    today = datetime.now(UTC).date()
    told = [(today + timedelta(days=day)).isoformat() for day in (first, end)]
    return ["--from", told[0], "--until", told[1]]


def test_rollups_are_made_anew_from_the_rows(call: Call, tmp_path: Path) -> None:
    assert call("db", "upgrade").code == 0
    engine = open_engine(f"sqlite:///{tmp_path / 'goodput.db'}")
    now = time.time()
    store(engine, [request(n, ended_at=now - n * 3600) for n in range(20)])
    before = rollup_bytes(engine)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM rollups"))
    assert rollup_bytes(engine) == {}
    told = call("db", "rebuild", *days(-2, 2), GOODPUT_NAME="agent-0")
    assert (told.code, told.out) == (0, "rebuilt the rollups of agent-0: 4 days\n")
    assert rollup_bytes(engine) == before
    engine.dispose()


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        (days(-6, 1), "--from: requests of days before"),
        (days(0, 0), "--until: must be a later day than --from"),
    ],
)
def test_days_that_cannot_be_made_anew_are_refused(
    call: Call, chosen: list[str], complaint: str
) -> None:
    told = call("db", "rebuild", *chosen)
    assert told.code == 2
    (line,) = said(told)
    assert line.startswith(complaint)


# demo


def test_the_demo_asks_for_a_receiver(call: Call) -> None:
    told = call("demo", GOODPUT_OTLP__GRPC="null", GOODPUT_OTLP__HTTP="null")
    assert said(told) == ["otlp: the demo sends spans; set otlp.grpc or otlp.http"]
