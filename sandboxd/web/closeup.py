"""One sandbox from near: what is known of it, its commands, and the end of their output."""

from __future__ import annotations

import asyncio
from typing import Any

from sandboxd.backends.base import Commands
from sandboxd.errors import InvalidRequest, SandboxdError
from sandboxd.overview import Row, failure_row
from sandboxd.pools import Pools
from sandboxd.types import SANDBOX_PREFIX, CommandInfo, Exited, SandboxState, Stderr, Stdout
from sandboxd.web.transcripts import Transcripts, ending
from sandboxd.web.view import lease_row

COMMANDS_SHOWN = 20
TAIL_BYTES = 8192
# A guest that does not answer keeps the page waiting for no longer.
PATIENCE_SECONDS = 2.0


async def closeup(pools: Pools, transcripts: Transcripts, sandbox_id: str) -> Row:
    """All of one sandbox. Raises SandboxNotFound, LeaseExpired, SandboxLost, InvalidRequest."""
    pool, sandbox_id = pools.holding(f"{SANDBOX_PREFIX}{sandbox_id}")
    known = await pool.inspect(sandbox_id)
    row: Row = {"id": sandbox_id, "pool": pool.name, "state": "GONE", "place": known.place}
    row["commands"] = transcripts.of(sandbox_id)
    if known.failure is not None:
        row["failure"] = failure_row(known.failure)
    sandbox = known.sandbox
    if sandbox is None:
        return row
    row["state"] = sandbox.state.name
    row["created"] = sandbox.created + pools.calendar_offset
    row["start_seconds"] = sandbox.start_seconds
    if sandbox.state is SandboxState.ACTIVE:
        row["lease"] = lease_row(pool, sandbox, pools.calendar_offset)
    if sandbox.connection is not None and sandbox.state in (SandboxState.ACTIVE, SandboxState.WARM):
        await _add_commands(row, sandbox.connection.commands)
    return row


async def _add_commands(row: Row, commands: Commands) -> None:
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            known = await commands.known()
            row["commands"] += [await _command(commands, info) for info in known[-COMMANDS_SHOWN:]]
    except TimeoutError:
        row["trouble"] = f"its commands were not told within {PATIENCE_SECONDS:g} s"
    except InvalidRequest:
        # It has none that keep their output.
        return
    except SandboxdError as error:
        row["trouble"] = error.message


async def _command(commands: Commands, info: CommandInfo) -> dict[str, Any]:
    begins = [max(kept.begin, kept.end - TAIL_BYTES) for kept in (info.stdout, info.stderr)]
    told: dict[str, Any] = {
        "id": info.id,
        "running": info.running,
        "stdout_bytes": info.stdout.end,
        "stderr_bytes": info.stderr.end,
    }
    streams = [bytearray(), bytearray()]
    ends = (info.stdout.end, info.stderr.end)
    if info.running and all(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return {**told, "stdout": "", "stderr": "", "ended": None}
    ended = None
    async with commands.attach(info.id, stdout_offset=begins[0], stderr_offset=begins[1]) as events:
        async for event in events:
            if isinstance(event, Stdout | Stderr):
                number = int(isinstance(event, Stderr))
                streams[number] += event.data
                begins[number] = event.offset + len(event.data)
            elif isinstance(event, Exited):
                ended = ending(event)
            if info.running and all(begin >= end for begin, end in zip(begins, ends, strict=True)):
                break
    stdout, stderr = (bytes(stream[-TAIL_BYTES:]).decode(errors="replace") for stream in streams)
    return {**told, "stdout": stdout, "stderr": stderr, "ended": ended}
