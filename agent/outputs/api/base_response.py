"""What all answers have in common."""

from pydantic import BaseModel, ConfigDict


class BaseResponse(BaseModel):
    """Any answer."""

    model_config = ConfigDict(extra="ignore")
