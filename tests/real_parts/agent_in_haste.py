"""The agent with minutes of five seconds, for spans that come within one.

Its figures do not depend on the length of a minute, so they are complete sooner. It also folds
rollups every second, and waits a few seconds for the span of a request that the plugin reported.
"""

import importlib

from agent.records import minute

# Before any module imports the length.
minute.MINUTE_LENGTH_S = 5
efficiency = importlib.import_module("agent.app.engines")
assert efficiency.MINUTE_LENGTH_S == minute.MINUTE_LENGTH_S
vars(efficiency)["_SPANS_COME_S"] = 1.0
vars(importlib.import_module("agent.app.storing"))["FOLD_EVERY_S"] = 1.0
vars(importlib.import_module("agent.pipeline.ended_requests"))["OWN_ROW_AFTER_S"] = 5.0
importlib.import_module("agent.__main__").start()
