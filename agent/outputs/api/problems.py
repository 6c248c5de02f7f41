"""Error responses of the API: problem details (RFC 9457) with one sentence in `detail`."""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query as QueryParameter
from fastapi.responses import JSONResponse
from pydantic import Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from agent.errors import StoreUnavailable
from agent.outputs.api.base_responses import BaseResponse
from agent.outputs.api.descriptions import describe
from agent.settings.values import did_you_mean, shown

PROBLEM_JSON = "application/problem+json"


class ProblemResponse(BaseResponse):
    """Problem details: RFC 9457."""

    title: str = Field(description="the phrase of the status", examples=["Not Found"])
    status: int = Field(description="the HTTP status", examples=[404])
    detail: str = Field(
        description="what is wrong, in one sentence",
        examples=["no request 'chat-1' is stored"],
    )


# Error responses of every query, for the API's documentation.
REFUSALS: Mapping[int | str, dict[str, Any]] = {
    422: {"model": ProblemResponse, "description": "a parameter is unknown or not valid"},
    503: {"model": ProblemResponse, "description": "the database does not answer now"},
}


def problem(status: int, detail: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a request that fails."""
    body = ProblemResponse(title=HTTPStatus(status).phrase, status=status, detail=detail)
    return JSONResponse(body.model_dump(), status, headers, media_type=PROBLEM_JSON)


def overloaded(sentence: str) -> JSONResponse:
    """The response to a query that cannot be answered now."""
    return problem(503, sentence, {"Retry-After": "1"})


def refuse(sentence: str) -> HTTPException:
    """The error that says what is wrong with a parameter."""
    return HTTPException(status_code=422, detail=sentence)


async def refuse_unknown(request: Request) -> None:
    """A dependency of every query: refuses a parameter that the route does not have."""
    if not request.query_params:
        return
    known = [
        field.alias
        for field in get_flat_params(request.scope["route"].dependant)
        if isinstance(field.field_info, QueryParameter)
    ]
    for name in request.query_params:
        if name not in known:
            close = did_you_mean(name, known) or f"; known are {', '.join(known) or 'none'}"
            raise refuse(f"{shown(name)} is not a parameter of this query{close}")


def add_problems(api: FastAPI) -> None:
    """Respond to every error with a problem."""
    api.add_exception_handler(StarletteHTTPException, _refused)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(StoreUnavailable, _unavailable)
    api.add_exception_handler(Exception, _failed)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException), "the handler is registered for this class"
    return problem(error.status_code, error.detail, error.headers)


async def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), "the handler is registered for this class"
    return problem(422, "; ".join(_sentence(detail) for detail in error.errors()))


def _sentence(detail: Mapping[str, Any]) -> str:
    # `loc` is the kind of parameter, then its name, then pydantic's own steps.
    _, name, *_ = detail["loc"]
    return f"{name}: {detail['msg'].removeprefix('Value error, ')} (got {detail['input']!r})"


async def _unavailable(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreUnavailable), "the handler is registered for this class"
    return overloaded(error.public)


async def _failed(_request: Request, _error: Exception) -> JSONResponse:
    return problem(500, "the query failed; the agent's log has the error")


PROBLEM = {"schema": {"$ref": f"#/components/schemas/{ProblemResponse.__name__}"}}


class DocumentedApi(FastAPI):
    """An application whose document has the media type of problems, and describes everything."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            document = super().openapi()
            for operation in _operations(document):
                _name_problems(operation["responses"])
            for model in _NOT_SENT:
                document["components"]["schemas"].pop(model, None)
            describe(document)
            _name_token(document)
        return super().openapi()


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


def _name_token(document: dict[str, Any]) -> None:
    """Say that queries may need a token, which depends on the agent's settings."""
    scheme = {"type": "http", "scheme": "bearer", "description": _TOKEN}
    document["components"]["securitySchemes"] = {"token": scheme}
    for path, methods in document["paths"].items():
        if path.startswith("/api/") or path == "/metrics":
            for operation in methods.values():
                operation["security"] = [{}, {"token": []}]


_TOKEN = "a token of `security.read_tokens`, where that is set (docs/security.md)"
# FastAPI's own models of refusals.
_NOT_SENT = ("HTTPValidationError", "ValidationError")
_NOT_PROBLEM = {"schema": {"$ref": f"#/components/schemas/{_NOT_SENT[0]}"}}


def _name_problems(responses: dict[str, Any]) -> None:
    # FastAPI gives each model the type of the route's own response.
    for response in responses.values():
        of_response = list((response.get("content") or {}).values())
        if PROBLEM in of_response or _NOT_PROBLEM in of_response:
            response["content"] = {PROBLEM_JSON: PROBLEM}
