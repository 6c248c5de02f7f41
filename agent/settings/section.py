"""What every part of the settings has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
