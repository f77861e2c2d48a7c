"""Pools of warm, isolated sandboxes for agentic reinforcement learning, leased over gRPC."""

from __future__ import annotations

from sandboxd import errors
from sandboxd.client import Box, Client
from sandboxd.interaction import Interaction
from sandboxd.replies import Cut, ExecResult, SandboxInfo
from sandboxd.sessions import Session, SessionResult
from sandboxd.sync import SyncClient
from sandboxd.types import ExitReason, FileInfo, FileKind, PoolStats

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Client",
    "Cut",
    "ExecResult",
    "ExitReason",
    "FileInfo",
    "FileKind",
    "Interaction",
    "PoolStats",
    "SandboxInfo",
    "Session",
    "SessionResult",
    "SyncClient",
    "__version__",
    "errors",
]
