"""The conditions of a selection on a table."""

from sqlalchemy import ColumnElement, FromClause

from agent.records.queries import Selection


def selected(table: FromClause, selection: Selection) -> list[ColumnElement[bool]]:
    """Conditions for rows of the selected agent, engine, model, tenant; of any objective."""
    return [
        table.c[name] == getattr(selection, name)
        for name in ("agent", "engine", "model", "tenant")
        if getattr(selection, name) is not None
    ]
