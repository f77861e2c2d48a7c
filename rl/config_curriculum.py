"""The settings of the curriculum: the band of solve rates in which a group teaches, and what is beyond."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from rl.config_section import Section

Share = Annotated[float, Field(ge=0, le=1)]


class CurriculumConfig(Section):
    """Which levels are drawn, by their estimated solve rates. Not read without `filter`."""

    low: Share = 0.05
    """Levels that are solved more rarely are hardly drawn."""
    high: Annotated[Share, Field(validate_default=True)] = 0.85
    """Levels that are solved more often are hardly drawn; when all are, there is nothing left to learn."""
    outside: Annotated[float, Field(gt=0, le=1)] = 0.02
    """How often a level outside of the band is drawn, relative to the best: so it is seen to come back."""
    open_at: Share = 0.25
    """The next level of a family opens once its hardest open one is solved so often."""
    memory: Annotated[float, Field(gt=0, le=1e6)] = 16.0
    """Episodes of a level, or of a problem of a fixed set, that its estimate looks back on: fewer follow the
    policy faster, less exactly."""
    rest: Annotated[int, Field(ge=0, le=1000)] = 4
    """Epochs that a problem of a fixed set is left out of, once so many of its episodes were seen and its
    solve rate is outside of the band; 0: none is left out."""

    @field_validator("high")
    @classmethod
    def _is_a_band(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low")
        if low is not None and value <= low:
            raise ValueError(f"it must be above low, which is {low:g}")
        return value
