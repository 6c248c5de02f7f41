"""What all answers have in common."""

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Any answer."""

    model_config = ConfigDict(extra="ignore")
