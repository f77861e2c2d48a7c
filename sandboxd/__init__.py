"""Pools of warm, isolated sandboxes for agentic reinforcement learning, leased over gRPC."""

from __future__ import annotations

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
