"""Pools of warm, isolated sandboxes for agentic reinforcement learning, leased over gRPC."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandboxd import errors
    from sandboxd.client import Box, Client
    from sandboxd.inspection_replies import SandboxFailure, SandboxReport
    from sandboxd.interaction import Interaction
    from sandboxd.remote_commands import DetachedCommand
    from sandboxd.replies import Cut, ExecResult, PrewarmPlan, SandboxInfo
    from sandboxd.sessions import Session, SessionResult
    from sandboxd.sync import SyncClient
    from sandboxd.types import (
        CommandInfo,
        Exited,
        ExitReason,
        FileInfo,
        FileKind,
        Kept,
        PoolState,
        PoolStats,
        QueuePosition,
        Share,
        Started,
        Stderr,
        Stdout,
    )

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Client",
    "CommandInfo",
    "Cut",
    "DetachedCommand",
    "ExecResult",
    "ExitReason",
    "Exited",
    "FileInfo",
    "FileKind",
    "Interaction",
    "Kept",
    "PoolState",
    "PoolStats",
    "PrewarmPlan",
    "QueuePosition",
    "SandboxFailure",
    "SandboxInfo",
    "SandboxReport",
    "Session",
    "SessionResult",
    "Share",
    "Started",
    "Stderr",
    "Stdout",
    "SyncClient",
    "__version__",
    "errors",
]

# What is shown is loaded when it is first asked for: a command must hear Ctrl-C before gRPC is loaded, and
# small processes need none of it. What no other module has is in `types`.
_HOMES = {
    "client": ("Box", "Client"),
    "inspection_replies": ("SandboxFailure", "SandboxReport"),
    "interaction": ("Interaction",),
    "remote_commands": ("DetachedCommand",),
    "replies": ("Cut", "ExecResult", "PrewarmPlan", "SandboxInfo"),
    "sessions": ("Session", "SessionResult"),
    "sync": ("SyncClient",),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "errors":
        return importlib.import_module("sandboxd.errors")
    home = next((home for home, names in _HOMES.items() if name in names), "types")
    value = globals()[name] = getattr(importlib.import_module(f"sandboxd.{home}"), name)
    return value
