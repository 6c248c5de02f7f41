"""Tries whether an agent could start now, beside one that runs with the same database."""

import importlib
import json
import os
import pkgutil
import signal
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing

import agent
from agent.app.connection_limits import (
    API,
    OTLP_GRPC,
    OTLP_HTTP,
    PROXY,
    ConnectionLimits,
    raise_descriptors,
)
from agent.app.discovery import discovery_of
from agent.app.doors import Doors
from agent.app.processes import workers_of
from agent.app.supervising import TRY, TRY_WITHIN_S, Plan
from agent.outputs.web import documentation_page, runbooks
from agent.settings import Settings
from agent.settings.values import host_and_port
from agent.sources.engine_plugin.receiver import try_socket
from agent.sources.listening import open_socket
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision

# An address, and the setting that has it.
_Address = tuple[str, str]


def listen_of(settings: Settings) -> str:
    """The address of the API and the page."""
    host = settings.listen.host
    return f"[{host}]:{settings.listen.port}" if ":" in host else f"{host}:{settings.listen.port}"


def _addresses_of(settings: Settings) -> Sequence[_Address]:
    otlp = settings.otlp
    optional = ((OTLP_HTTP, otlp.http), (OTLP_GRPC, otlp.grpc), (PROXY, settings.proxy.listen))
    given = [(setting, address) for setting, address in optional if address is not None]
    return [(API, listen_of(settings)), *given]


def taken_by(settings: Settings) -> set[str]:
    """The addresses and sockets of an agent with these settings."""
    plugins = {str(engine.plugin_socket) for engine in settings.engines if engine.plugin_socket}
    return plugins | {address for _, address in _addresses_of(settings)}


def begin_to_try() -> Collection[str]:
    """Import every module, as the program may be half upgraded; returns what the running agent has
    taken. This process ends in time, also if nobody waits for it any more."""
    signal.alarm(int(TRY_WITHIN_S))
    for module in pkgutil.walk_packages(agent.__path__, f"{agent.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return frozenset(json.loads(os.environ[TRY]))


def plan_text(proxy: str | None, workers: int) -> str:
    """A plan as the process that began the trial reads it."""
    return json.dumps(Plan(proxy, workers)._asdict())


def try_agent(settings: Settings) -> str:
    """Do what the start of an agent does, short of its work, and return its plan. What the running
    agent has taken is free when it has stopped.

    Raises SettingsInvalid, and whatever the import of a module raises.
    """
    taken = begin_to_try()
    Doors(settings, ConnectionLimits(raise_descriptors(), lambda *_: None))
    discovery_of(settings)
    try_listening(_addresses_of(settings), taken)
    for engine in settings.engines:
        path = engine.plugin_socket
        if path is not None:
            try_socket(engine.name, path, is_own=str(path) in taken)
    open_engine(settings.storage.own_url).dispose()
    newest_revision()
    documentation_page()
    runbooks()
    return plan_text(settings.proxy.listen, workers_of(settings))


def try_listening(addresses: Sequence[_Address], taken: Collection[str]) -> None:
    """Listen where the running agent does not. Raises SettingsInvalid for a taken address."""
    with ExitStack() as opened:
        for setting, address in addresses:
            if address not in taken:
                opened.enter_context(closing(open_socket(setting, *host_and_port(address))))
