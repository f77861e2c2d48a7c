"""The documentation names everything that exists: settings, error reasons, exit reasons."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

import rl.config
from sandboxd.config import Config
from sandboxd.types import ExitReason
from sandboxd.v1 import errors_pb2

DOCS = Path(__file__).parent.parent / "docs"


def _sections(of: type[BaseModel]) -> set[type[BaseModel]]:
    """This section and all within it."""
    found = {of}
    for field in of.model_fields.values():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _sections(kind)
    return found


@pytest.mark.parametrize(("settings", "page"), [(Config, "configuration.md"), (rl.config.Config, "rl.md")])
def test_every_section_of_the_settings_has_its_table(settings: type[BaseModel], page: str) -> None:
    """`make check` compares the tables with the settings: keys, defaults, bounds and meanings."""
    text = (DOCS / page).read_text()
    for section in _sections(settings):
        assert f"<!-- settings {section.__module__}.{section.__name__} -->" in text, section


def test_every_reason_is_documented() -> None:
    text = (DOCS / "protocol.md").read_text()
    for reason in [*errors_pb2.ErrorReason.keys()[1:], *ExitReason]:
        assert f"| {reason} |" in text, f"docs/protocol.md does not explain {reason}"
