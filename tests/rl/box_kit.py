"""Sandboxes of the fake backend behind a daemon in this process; their commands run on this host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rl.sandboxes import DaemonSandboxes
from sandboxd import Client
from sandboxd.config import load
from sandboxd.daemon import running


@asynccontextmanager
async def fake_sandboxes(directory: Path, faults: Sequence[str] = ()) -> AsyncIterator[DaemonSandboxes]:
    """Leases from a pool called `python`, with such faults on purpose."""
    pools = {"python": {"backend": "fake", "warm": 2}}
    state = directory / "state"
    config = load(None, state_dir=state, drain_seconds=0.2, pools=pools, faults=list(faults))
    async with running(config) as addresses, Client(addresses[0]) as client:
        yield DaemonSandboxes(client, "python", ttl=60, timeout=20)
