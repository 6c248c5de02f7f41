"""The base class of all responses."""

from pydantic import BaseModel, ConfigDict


class BaseResponse(BaseModel):
    """Any response."""

    model_config = ConfigDict(extra="ignore")
