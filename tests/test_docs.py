"""The documentation names everything that exists: settings, error reasons, exit reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import rl.config
from sandboxd.config import Config, FakeConfig, LimitsConfig, PoolConfig, RetryConfig, TenantConfig
from sandboxd.types import ExitReason
from sandboxd.v1 import errors_pb2

DOCS = Path(__file__).parent.parent / "docs"


DAEMON = [Config, PoolConfig, LimitsConfig, RetryConfig, TenantConfig, FakeConfig]
LOOP = [
    rl.config.Config,
    rl.config.TrainerConfig,
    rl.config.EpisodeConfig,
    rl.config.GeneratorConfig,
    rl.config.SandboxesConfig,
    rl.config.HeldOutConfig,
]
PAGES = [*((section, "configuration.md") for section in DAEMON), *((section, "rl.md") for section in LOOP)]


@pytest.mark.parametrize(("section", "page"), PAGES)
def test_every_setting_is_documented_with_its_default(section: type[BaseModel], page: str) -> None:
    text = (DOCS / page).read_text()
    for name, setting in section.model_fields.items():
        rows = [line for line in text.splitlines() if line.startswith((f"| `{name}` |", f"### `[{name}]`"))]
        assert rows, f"docs/{page} has no row for {section.__name__}.{name}"
        default: Any = setting.default
        if isinstance(default, int | float) and not isinstance(default, bool):
            written = {row.split("|")[2].strip() for row in rows}
            assert written & {f"{default:g}", str(default)}, f"the default of {name} is {default}"


def test_every_reason_is_documented() -> None:
    text = (DOCS / "protocol.md").read_text()
    for reason in [*errors_pb2.ErrorReason.keys()[1:], *ExitReason]:
        assert f"| {reason} |" in text, f"docs/protocol.md does not explain {reason}"
