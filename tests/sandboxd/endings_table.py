"""The phases that a call can be in when it ends: the rows of the table of endings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandboxd.types import PoolStats

# A start takes so long where it is held; the last test of each daemon sees it over.
SLOW_SECONDS = 3
FAULTS = ("", *(f"slow {phase} 1 {SLOW_SECONDS}" for phase in ("pull", "create", "ready")))
BACKENDS = ("fake", "namespace")
Count = Callable[[PoolStats], bool]


@dataclass(frozen=True, slots=True)
class Phase:
    """A call in one phase. `pool` are the settings of its cells' pools, `there` tells from its counts that
    it is in the phase; without them it is a command's, in pools that keep nothing.

    `held`: its caller, or someone else, has a sandbox of the pool before. `lasting`: what it began goes on
    without it for a while. `frozen`: the sandbox does not run until the call has ended. `copying`: its files
    are being copied, which does not go on by itself.
    """

    name: str
    call: str
    fault: str = ""
    pool: str = ""
    there: Count | None = None
    held: bool = False
    lasting: bool = False
    frozen: bool = False
    blind: bool = False
    copying: bool = False
    replies_held: bool = False
    backends: tuple[str, ...] = BACKENDS

    def __str__(self) -> str:
        return self.name


def starting(name: str, call: str, phase: str, count: int = 1) -> Phase:
    return Phase(
        name,
        call,
        fault=f"slow {phase} 1 {SLOW_SECONDS}",
        pool=f"warm = {int(call == 'fork')}",
        # A pool that gave its warm one away is making another.
        there=lambda stats: stats.starting >= count,
        held=call == "fork",
        lasting=True,
    )


def waits(stats: PoolStats) -> bool:
    return stats.waiting == 1


def granted(count: int) -> Count:
    # A lease whose reply does not arrive ends soon, perhaps before this is asked again.
    return lambda stats: stats.acquired_total >= count


NAMESPACE = ("namespace",)
PHASES = (
    Phase("queued", "acquire", pool="warm = 1\nsize_limit = 1", there=waits, held=True),
    starting("pulling", "acquire", "pull"),
    starting("creating", "acquire", "create"),
    starting("ready-check", "acquire", "ready"),
    Phase("setup", "acquire", pool=f'warm = 0\nsetup = ["sleep", "{SLOW_SECONDS}"]', lasting=True),
    Phase("reply", "acquire", pool="warm = 2", there=granted(1), replies_held=True),
    Phase("gang-queued", "gang", pool="warm = 2\nsize_limit = 2", there=waits, held=True),
    starting("gang-creating", "gang", "create", 2),
    Phase("gang-reply", "gang", pool="warm = 2", there=granted(2), replies_held=True),
    starting("fork-creating", "fork", "create", 2),
    Phase("before-start", "silent", frozen=True, blind=True, backends=NAMESPACE),
    Phase("run-before-start", "run", frozen=True, blind=True, backends=NAMESPACE),
    Phase("interact-before-start", "unstarted", blind=True),
    Phase("silent", "silent"),
    Phase("printing", "printing"),
    Phase("named", "named"),
    Phase("detached", "detached"),
    Phase("run", "run"),
    # The command is another caller's.
    Phase("attached", "attach", blind=True),
    Phase("read-unread", "read", blind=True),
    Phase("write-unfinished", "write"),
    Phase("download-unread", "download", blind=True),
    Phase("upload-unfinished", "upload"),
    Phase("snapshot-copying", "snapshot", copying=True, backends=NAMESPACE),
    Phase("fork-copying", "fork", copying=True, backends=NAMESPACE),
    Phase("stdin-open", "stdin_open"),
    Phase("stdin-unread", "stdin_unread"),
    Phase("terminal", "terminal", backends=NAMESPACE),
)


def is_command(phase: Phase) -> bool:
    return not phase.pool
