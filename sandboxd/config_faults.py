"""What every section of the settings refuses, and what is wrong with it in one line for a person."""

from __future__ import annotations

import difflib
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from sandboxd.addresses import is_plain


class Section(BaseModel):
    """A table of a settings file: unknown keys are refused, and numbers are numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number(cls, value: object, info: ValidationInfo) -> object:
        """pydantic reads numbers out of text and booleans: `warm = true` would be one sandbox."""
        allowed = kinds(cls.model_fields[str(info.field_name)].annotation)
        if allowed & {int, float} and isinstance(value, bool | str):
            raise ValueError("must be a number, without quotes")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: object) -> object:
        """Who reads a path or an address ends at a zero byte, or fails, in the midst of a start."""
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for text in parts if isinstance(parts, list | tuple) else [value]:
            if isinstance(text, str) and not is_plain(text):
                raise ValueError(f"{text!r} must be text in UTF-8, without a zero byte")
        return value


# What the validator calls by Python's names.
TOML_WORDS = {
    "list_type": "must be a list, in brackets",
    "tuple_type": "must be a list, in brackets",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "string_type": "must be text, in quotes",
    "path_type": "must be text, in quotes",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
}


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first fault in one line: `key = value: what is wrong`, with the nearest key for unknown ones."""
    fault = error.errors()[0]
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _known_keys(model, fault["loc"][:-1])
        nearest = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known here: {', '.join(known)}"
        return f"unknown key {key!r} = {fault['input']!r}; {hint}"
    message = TOML_WORDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    # A whole section is no value that says where the fault is.
    section = fault["type"] == "value_error" and isinstance(fault["input"], dict)
    value = "" if section else f" = {fault['input']!r}"
    return f"{key}{value}: {message[0].lower()}{message[1:]}"


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at `location`, found by walking the model's annotations."""
    current: Any = model
    for part in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            current = current.model_fields[str(part)].annotation if part in current.model_fields else None
        else:
            current = next((a for a in getattr(current, "__args__", ()) if a is not str), None)
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []


def kinds(annotation: Any) -> set[Any]:
    """The types that a value may have, out of unions and annotations; not those inside lists and tables."""
    if get_origin(annotation) in (Annotated, Union, UnionType):
        return {kind for each in get_args(annotation) for kind in kinds(each)}
    return {annotation} if isinstance(annotation, type) else set()
