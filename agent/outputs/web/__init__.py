"""The agent's own page."""

from importlib.resources import files


def first_page() -> str:
    """The HTML of the first page, which fetches its figures from the API."""
    return files(__name__).joinpath("page.html").read_text(encoding="utf-8")
