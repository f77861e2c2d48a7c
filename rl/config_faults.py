"""What is wrong with a run's settings, in one line that names the key, the value and the way out."""

from __future__ import annotations

import difflib

from pydantic import BaseModel, ValidationError

# What the validator calls by Python's names.
TOML_WORDS = {
    "list_type": "must be a list, in brackets",
    "tuple_type": "must be a list, in brackets",
    "model_type": "must be a table",
    "string_type": "must be text, in quotes",
    "path_type": "must be text, in quotes",
}
WITHHELD = {"temperature", "top_p", "top_k", "min_p"}
"""Settings that a user may look for and that would bias every importance ratio."""


def explain(error: ValidationError, settings: type[BaseModel]) -> str:
    """The first fault in one line: `key = value: what is wrong`, with the nearest key for an unknown one."""
    fault = error.errors()[0]
    location = fault["loc"]
    key = ".".join(str(part) for part in location)
    if fault["type"] == "extra_forbidden" and location[-1] in WITHHELD:
        return (
            f"{key} = {fault['input']!r}: training draws from the whole policy at temperature 1, for without "
            "the sampling mask anything else biases the importance ratios; leave it out"
        )
    if fault["type"] == "extra_forbidden":
        section = settings if len(location) == 1 else settings.model_fields[str(location[0])].annotation
        known = list(getattr(section, "model_fields", {}))
        nearest = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known here: {', '.join(known)}"
        return f"unknown key {key!r} = {fault['input']!r}; {hint}"
    message = TOML_WORDS.get(fault["type"], fault["msg"].removeprefix("Value error, "))
    return f"{key} = {fault['input']!r}: {message[0].lower()}{message[1:]}"
