"""Reference pages of metrics, settings, alerts and tables, made from their declarations."""

from agent.render.reference.reference_files import Declared, render_reference

__all__ = ["Declared", "render_reference"]
