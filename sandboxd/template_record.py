"""A template as the journal writes it: JSON, in which what need not be text is text all the same."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from sandboxd.types import Limits, Network, Template


def dump(template: Template) -> str:
    """All of it; bytes that are no UTF-8 are surrogates, which JSON escapes."""
    return json.dumps(dataclasses.asdict(template) | _texts(template))


def _texts(template: Template) -> dict[str, Any]:
    return {
        "env": {_text(name): _text(value) for name, value in template.env.items()},
        "cwd": _text(template.cwd),
        "setup": [_text(word) for word in template.setup],
    }


def load(text: str) -> Template:
    """The same again. What a newer daemon wrote beside is left out, for those who have it hold leases. Raises
    ValueError, TypeError, KeyError, AttributeError where it is no template.
    """
    values = _known(Template, json.loads(text))
    values["env"] = {_bytes(name): _bytes(value) for name, value in values["env"].items()}
    values["cwd"] = _bytes(values["cwd"])
    values["setup"] = tuple(_bytes(word) for word in values["setup"])
    values["limits"] = Limits(**_known(Limits, values["limits"]))
    values["network"] = Network(values["network"])
    values["branches"] = tuple(values["branches"])
    return Template(**values)


def _known(kind: type[Template | Limits], values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
