"""What every table of the settings refuses."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A table of a settings file: unknown keys are refused, and numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic reads numbers out of text and booleans, and booleans out of both: `steps = true` would be
        one step.
        """
        allowed = _kinds(cls.model_fields[str(info.field_name)].annotation)
        if allowed & {int, float} and isinstance(value, bool | str):
            raise ValueError("must be a number, without quotes")
        if bool in allowed and not isinstance(value, bool):
            raise ValueError("must be true or false, without quotes")
        if Path in allowed and value == "":
            # Not the working directory, in which a run would move another of its name aside.
            raise ValueError("must be a directory; leave it out for the default")
        if isinstance(value, str) and "\0" in value:
            # No path and no name has one; who reads such fails in the midst of a start.
            raise ValueError("must not contain a zero byte")
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The types that a value may have, out of unions and annotations; not those inside lists and tables."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return {kind for each in get_args(annotation) for kind in _kinds(each)}
    return {annotation} if isinstance(annotation, type) else set()
