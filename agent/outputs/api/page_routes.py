"""The page at `/` and its files, which hold no figures: it queries the API for these."""

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from agent.outputs.web import ASSETS_PATH, PAGE_POLICY, first_page

ASSETS = "/assets"


def add_page(api: FastAPI, *, simulated: bool) -> None:
    """Serve the page."""
    page = first_page(simulated=simulated)

    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers={"Content-Security-Policy": PAGE_POLICY})

    api.add_api_route("/", show, include_in_schema=False)
    api.mount(ASSETS, StaticFiles(directory=ASSETS_PATH))
