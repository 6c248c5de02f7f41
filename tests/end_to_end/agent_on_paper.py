"""The agent on a machine whose cgroups are the files of a folder, `PAPER_CGROUPS`."""

import os
from pathlib import Path

from agent.cli import command
from agent.sources.host.source import HostSource

defaults = HostSource.__init__.__kwdefaults__
assert defaults is not None
defaults["cgroups"] = Path(os.environ["PAPER_CGROUPS"])
command()
