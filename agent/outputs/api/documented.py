"""The application with its OpenAPI document: its errors are problems, by media type, too."""

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from agent.outputs.api.problems import PROBLEM_JSON, ProblemResponse

PROBLEM = {"schema": {"$ref": f"#/components/schemas/{ProblemResponse.__name__}"}}


class DocumentedApi(FastAPI):
    """An application whose document has the media type of problems."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document."""
        if self.openapi_schema is None:
            for operation in _operations(super().openapi()):
                _name_problems(operation["responses"])
        return super().openapi()


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for methods in document["paths"].values():
        yield from methods.values()


def _name_problems(responses: dict[str, Any]) -> None:
    # FastAPI gives each model the type of the route's own response.
    for response in responses.values():
        if PROBLEM in (response.get("content") or {}).values():
            response["content"] = {PROBLEM_JSON: PROBLEM}
