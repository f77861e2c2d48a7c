"""What sandboxes cost that do nothing: memory and processor time of all their processes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxd.bench.result import Result
from sandboxd.bench.session import Session

# So many of them are looked at: each costs a call and a look at its memory maps.
SAMPLE = 64
# Over less than this a share of a processor says nothing.
SHORTEST_SECONDS = 1.0


@contextlib.asynccontextmanager
async def looked_at(session: Session, seconds: float, result: Result) -> AsyncIterator[None]:
    """Enters into the result what up to `SAMPLE` leased sandboxes took while the block ran, for `seconds`.

    Nothing is where their processes cannot be seen: of a daemon elsewhere, of other users, of containers.
    """
    if seconds < SHORTEST_SECONDS:
        yield
        return
    processes = await _processes(session)
    before, begin = [_cpu(pids) for pids in processes], time.monotonic()
    yield
    after, spent = [_cpu(pids) for pids in processes], time.monotonic() - begin
    memory = await asyncio.to_thread(lambda: [_memory(pids) for pids in processes])
    spans = zip(before, after, strict=True)
    used = [end - start for start, end in spans if start is not None and end is not None]
    sizes = [size for size in memory if size is not None]
    if used and len(used) == len(sizes):
        result.more["idle"] = {
            "sandboxes": len(used),
            "seconds": spent,
            "pss_bytes": sum(sizes) / len(sizes),
            "most_pss_bytes": max(sizes),
            "cpu_share": sum(used) / len(used) / spent,
            "most_cpu_share": max(used) / spent,
        }


async def _processes(session: Session) -> list[list[int]]:
    """Of each sandbox, by the pid namespace of its first one; read by this host's /proc."""
    if session.daemon_pid() is None:
        return []
    held = [each async for each in session.client.list_sandboxes(session.pool) if each.state == "ACTIVE"]
    places = [(await session.client.inspect(each.name)).place for each in held[:SAMPLE]]
    firsts = [int(place["pid"]) for place in places if "pid" in place]
    return await asyncio.to_thread(_in_namespaces_of, firsts)


def _in_namespaces_of(firsts: list[int]) -> list[list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (namespace := _namespace(int(entry.name))):
            found[namespace].append(int(entry.name))
    own = _namespace(os.getpid())
    return [found[name] for first in firsts if (name := _namespace(first)) not in ("", own)]


def _namespace(pid: int) -> str:
    """Empty where it cannot be seen."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - of what has no path
    return ""


def _cpu(pids: list[int]) -> float | None:
    """Seconds in all, to the nanosecond: the ticks of /proc/PID/stat are too coarse for what does nothing."""
    with contextlib.suppress(OSError):
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
    return None


def _memory(pids: list[int]) -> int | None:
    """Proportional set size: what is shared counts in parts."""
    total = 0
    with contextlib.suppress(OSError):
        for pid in pids:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
        return total
    return None
