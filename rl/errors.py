"""Why a run ends early. A class exists only where the caller acts differently.

RlError
├── ConfigError      the user must change the configuration or the command line: exit code 2
├── TrainerDead      the trainer process is gone; what it had not saved is lost
├── CheckpointFailed a checkpoint could not be written: training goes on, those before it stand
├── NonFiniteStep    loss or gradient was not finite; the weights are those of the step before
├── StarvedError     no batch can be filled: a producer returned early, or every group is dropped
├── Exhausted        the tasks have run out: the run ends early, and well
└── LedgerError      an episode, token or sandbox is unaccounted for: a defect of the loop itself
"""

from __future__ import annotations


class RlError(Exception):
    """Root of everything that `rl` raises on purpose."""


class ConfigError(RlError):
    """A setting is unknown, out of range or names something that is not there."""


class TrainerDead(RlError):
    """The trainer process ended while the loop needed it."""


class CheckpointFailed(RlError):
    """The disk is full, read-only or broken; the checkpoints that were there still are."""


class NonFiniteStep(RlError):
    """A training step produced a value that is not finite and was taken back."""


class StarvedError(RlError):
    """No batch can be filled any more although steps remain."""


class Exhausted(RlError):
    """There is no further task, or no further batch can form from those there were."""


class LedgerError(RlError):
    """What was produced does not equal what was used, dropped and left over."""
