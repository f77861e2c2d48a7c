"""Pools of warm, isolated sandboxes for agentic reinforcement learning, leased over gRPC."""

from __future__ import annotations

from sandboxd import errors
from sandboxd.client import Box, Client
from sandboxd.replies import ExecResult, SandboxInfo
from sandboxd.sync import SyncClient
from sandboxd.types import ExitReason, PoolStats

__version__ = "0.1.0"

__all__ = [
    "Box",
    "Client",
    "ExecResult",
    "ExitReason",
    "PoolStats",
    "SandboxInfo",
    "SyncClient",
    "__version__",
    "errors",
]
