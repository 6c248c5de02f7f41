"""The configuration of Alertmanager: routes, receivers and inhibitions."""

from typing import Any

from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.render.alerts.agent_alerts import WATCHDOG
from agent.render.alerts.alert_rule import Severity
from agent.render.alerts.inhibitions import inhibit_rules
from agent.render.alerts.receivers import DEADMAN, PAGE, TICKET, Receivers
from agent.render.alerts.timings import Timings

# The receiver of alerts that only mute others.
_NOBODY = "nobody"


def alertmanager(timings: Timings, receivers: Receivers) -> dict[str, Any]:
    """The configuration as Alertmanager 0.25 and newer reads it."""
    return {
        "route": _route(timings),
        "inhibit_rules": list(inhibit_rules()),
        "receivers": [*receivers.configured(), {"name": _NOBODY}],
    }


def _route(timings: Timings) -> dict[str, Any]:
    return {
        "receiver": TICKET,
        # `model_name` is vLLM's own label of the model.
        "group_by": ["alertname", "objective", "model", "model_name"],
        "group_wait": timings.hold(30),
        "group_interval": timings.hold(5 * MINUTE_S),
        "repeat_interval": timings.hold(24 * HOUR_S),
        "routes": [
            {
                "receiver": DEADMAN,
                "matchers": [f'alertname="{WATCHDOG}"'],
                "group_wait": "0s",
                "group_interval": timings.hold(MINUTE_S),
                "repeat_interval": timings.hold(MINUTE_S),
            },
            {"receiver": _NOBODY, "matchers": [f'severity="{Severity.NONE}"']},
            {
                "receiver": PAGE,
                "matchers": [f'severity="{Severity.PAGE}"'],
                "group_wait": timings.hold(10),
                "repeat_interval": timings.hold(4 * HOUR_S),
            },
        ],
    }
