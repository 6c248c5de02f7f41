"""The `mcp` command: read-only tools over a running agent, for assistants."""

import os
from pathlib import Path
from typing import Annotated

import typer

from agent.command_options import ConfigFile, TokenFile, server_url
from agent.errors import SettingsInvalid
from agent.settings import Settings, load
from agent.terminal import echo

_MISSING = "the MCP SDK (mcp 2.3 or newer) is not installed; run `pip install 'goodput-agent[mcp]'`"
# The tools have the agent's read token, so they listen for this machine alone.
_HOST = "127.0.0.1"

AgentToRead = Annotated[
    str | None,
    typer.Option(
        "--agent",
        metavar="URL",
        help="The running agent to read, as http://127.0.0.1:9470. Default: that of the settings, "
        "with its token.",
    ),
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        "--http",
        min=1,
        max=65535,
        metavar="PORT",
        help="Serve streamable HTTP at http://127.0.0.1:PORT/mcp. Default: stdio.",
    ),
]


def mcp(
    *,
    agent: AgentToRead = None,
    http: HttpPort = None,
    config: ConfigFile = None,
    token_file: TokenFile = None,
) -> None:
    """Let an assistant read a running agent, over the Model Context Protocol.

    Its tools are `summary`, `worst_requests`, `why`, `check` and `compare`. They only read.

    Example, as the command of an assistant's MCP server:
    `goodput-agent mcp --agent http://127.0.0.1:9470 --token-file read-token`.
    """
    from agent.agent_api import open_agent

    try:
        from agent.assistant_tools import make_server
    except ImportError as error:
        raise SettingsInvalid([_MISSING]) from error

    settings = load(config, os.environ)
    url, tokens = _agent_of(settings, agent, token_file)
    with open_agent(url, tokens, settings.tls.ca) as api:
        server = make_server(api)
        if http is None:
            server.run("stdio")
        else:
            echo(f"goodput-agent: MCP at http://{_HOST}:{http}/mcp", err=True)
            server.run("streamable-http", host=_HOST, port=http)


def _agent_of(
    settings: Settings, url: str | None, token_file: Path | None
) -> tuple[str, Path | None]:
    """The agent's URL and the file with its token; the settings' token is for their agent alone."""
    if url is not None:
        return server_url("--agent", url), token_file
    from agent.agent_api import own_agent

    own_url, own_tokens = own_agent(settings)
    return own_url, token_file or own_tokens
