"""The base class of every section of the settings."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
