"""How many sandboxes a host carries, and how pools share that. Pure: facts in, numbers out.

For each limit, with `value` what the host allows and `spent` what is used or kept back:

    sum over pools of (ceiling of the pool * need of one of its sandboxes)  <=  value - spent

Where the sum is larger, every pool keeps min(its ceiling, level), with the largest level that fits: small
pools keep what they ask for, large ones are cut to the same height. A pool gets the least of what the limits
leave it, and never less than one sandbox. What could not be read limits nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sandboxd.doctor import needs
from sandboxd.doctor.facts import UNLIMITED, Demand, Facts

SYSCTL_NAMESPACES = tuple(
    f"user.max_{kind}_namespaces" for kind in ("pid", "mnt", "net", "ipc", "uts", "cgroup")
)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the host that sandboxes share. `cure` names the command for a new value of it."""

    check: str
    title: str
    value: int | None
    spent: int
    need: needs.Need
    cure: Callable[[int], str]

    @property
    def room(self) -> int:
        """What is left for sandboxes; UNLIMITED where the value is, or is not known."""
        return UNLIMITED if self.value is None or self.value >= UNLIMITED else self.value - self.spent

    def wanted(self, demands: Iterable[Demand]) -> int:
        """The value that would carry all the ceilings."""
        return self.spent + sum(demand.count * self.need[demand.kind] for demand in demands)

    def level(self, demands: Sequence[Demand]) -> int:
        """The height to which pools are cut so that all fit."""
        low, high = 0, max((demand.count for demand in demands), default=0)
        while low < high:
            middle = (low + high + 1) // 2
            used = sum(min(demand.count, middle) * self.need[demand.kind] for demand in demands)
            low, high = (middle, high) if used <= self.room else (low, middle - 1)
        return low


@dataclass(frozen=True, slots=True)
class Share:
    """How many sandboxes a pool may have, and what keeps it from having more; None: it has what it asked."""

    count: int
    limit: Limit | None = None


def limits(facts: Facts) -> list[Limit]:
    """All that bind a number of sandboxes, whether or not they bite."""
    return [*_of_tasks(facts), *_of_files(facts), *_of_namespaces(facts)]


def _of_tasks(facts: Facts) -> list[Limit]:
    tasks = facts.tasks or 0
    groups = facts.groups
    # Root's own processes have other users than its sandboxes.
    own = 0 if facts.root else facts.own_tasks or 0
    return [
        Limit(
            "pid_max", "process numbers (kernel.pid_max)", facts.sysctl.get("kernel.pid_max"),
            tasks + needs.PIDS_KEPT, needs.TASKS, _sysctl("kernel.pid_max"),
        ),
        Limit(
            "threads_max", "processes of the host (kernel.threads-max)",
            facts.sysctl.get("kernel.threads-max"), tasks + needs.TASKS_KEPT, needs.TASKS,
            _sysctl("kernel.threads-max"),
        ),
        Limit(
            "cgroup_pids", "processes of this control group (pids.max)", groups.pids_max,
            groups.pids_now + needs.TASKS_KEPT, needs.OWN_TASKS,
            lambda value: f"echo {value} > {groups.pids_group}/pids.max, or TasksMax={value} in the unit",
        ),
        Limit(
            # Binds the sandboxes of root, too: they run as another user, without root's rights.
            "processes", "processes of a user (RLIMIT_NPROC)", facts.processes,
            own + needs.USER_TASKS_KEPT, needs.OWN_TASKS,
            lambda value: f"ulimit -Hu {value} before `sandboxd serve`, or LimitNPROC={value} in its unit",
        ),
    ]  # fmt: skip


def _of_files(facts: Facts) -> list[Limit]:
    return [
        Limit(
            "open_files", "open files of the daemon (RLIMIT_NOFILE)", facts.open_files,
            needs.DAEMON_FILES_KEPT, needs.DAEMON_FILES,
            lambda value: f"ulimit -Hn {value} before `sandboxd serve`, or LimitNOFILE={value} in its unit",
        ),
        Limit(
            "file_max", "open files of the host (fs.file-max)", facts.sysctl.get("fs.file-max"),
            (facts.files or 0) + needs.HOST_FILES_KEPT, needs.HOST_FILES, _sysctl("fs.file-max"),
        ),
    ]  # fmt: skip


def _of_namespaces(facts: Facts) -> list[Limit]:
    known = [name for name in SYSCTL_NAMESPACES if name in facts.sysctl]
    lowest = min(known, key=lambda name: facts.sysctl[name], default=SYSCTL_NAMESPACES[0])
    user = "user.max_user_namespaces"
    found = [
        Limit(
            "namespaces", f"namespaces of a kind ({lowest} is the lowest)", facts.sysctl.get(lowest),
            needs.NAMESPACES_KEPT, needs.NAMESPACES, _sysctl(lowest),
        ),
        Limit(
            "mount_max", "mounts of a namespace (fs.mount-max)", facts.sysctl.get("fs.mount-max"),
            (facts.mounts or 0) + needs.MOUNTS_KEPT, needs.HOST_MOUNTS, _sysctl("fs.mount-max"),
        ),
    ]  # fmt: skip
    per_sandbox = needs.USER_NAMESPACES if facts.nested else dict.fromkeys(needs.USER_NAMESPACES, 0)
    title = f"user namespaces ({user})"
    return [
        *found,
        Limit(
            "user_namespaces",
            title,
            facts.sysctl.get(user),
            needs.NAMESPACES_KEPT,
            per_sandbox,
            _sysctl(user),
        ),
    ]


def _sysctl(name: str) -> Callable[[int], str]:
    return lambda value: f"sysctl -w {name}={round_up(value)}"


def round_up(value: int) -> int:
    """The next power of two: what is set by hand should not be met again with the next few sandboxes."""
    return 1 << max(0, value - 1).bit_length()


def shares(bounds: Sequence[Limit], demands: Sequence[Demand]) -> dict[str, Share]:
    """What each pool may have."""
    given = {demand.pool: Share(demand.count) for demand in demands}
    for limit in bounds:
        level = max(1, limit.level(demands))
        for demand in demands:
            if limit.need[demand.kind] and level < given[demand.pool].count:
                given[demand.pool] = Share(level, limit)
    return given


class Capacity:
    """What the pools of one daemon have been given; it stays true when a pool is resized."""

    def __init__(self, bounds: Sequence[Limit], demands: Sequence[Demand]) -> None:
        self._bounds = bounds
        self.kinds = {demand.pool: demand.kind for demand in demands}
        self.shares = shares(bounds, demands)

    def resize(self, pool: str, wanted: int) -> Share:
        """Gives `pool` up to `wanted` sandboxes of what the others leave, and at least one."""
        share = Share(wanted)
        for limit in self._bounds:
            need = limit.need[self.kinds[pool]]
            if need and (fitting := max(1, (limit.room - self._others(pool, limit)) // need)) < share.count:
                share = Share(fitting, limit)
        self.shares[pool] = share
        return share

    def _others(self, pool: str, limit: Limit) -> int:
        return sum(
            share.count * limit.need[self.kinds[name]] for name, share in self.shares.items() if name != pool
        )
