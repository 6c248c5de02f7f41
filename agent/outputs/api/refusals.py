"""Error responses of the API: one sentence in `detail`, whatever the reason."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from agent.errors import StoreUnavailable
from agent.outputs.api.responses import ProblemResponse

# Error responses of every query, for the API's documentation.
REFUSALS: Mapping[int | str, dict[str, Any]] = {
    422: {"model": ProblemResponse, "description": "a parameter is not valid"},
    503: {"model": ProblemResponse, "description": "the database does not answer now"},
}


def refuse(sentence: str) -> HTTPException:
    """The error that says what is wrong with a parameter."""
    return HTTPException(status_code=422, detail=sentence)


def add_refusals(api: FastAPI) -> None:
    """Answer invalid parameters and an unavailable store with a sentence."""
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(StoreUnavailable, _unavailable)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "the handler is registered for this class"
    sentences = "; ".join(_sentence(detail) for detail in error.errors())
    return JSONResponse({"detail": sentences}, status_code=422)


def _sentence(detail: Mapping[str, Any]) -> str:
    # `loc` is the kind of parameter, then its name, then pydantic's own steps.
    _, name, *_ = detail["loc"]
    return f"{name}: {detail['msg'].removeprefix('Value error, ')} (got {detail['input']!r})"


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreUnavailable), "the handler is registered for this class"
    return overloaded(error.public)


def overloaded(sentence: str) -> JSONResponse:
    """The response to a query that cannot be answered now."""
    return JSONResponse({"detail": sentence}, status_code=503, headers={"Retry-After": "1"})
