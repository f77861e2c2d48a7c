"""Judges a host: facts and demands in, findings out. Pure.

What binds the number of sandboxes is a FAILURE where it falls short (`capacity` says how); what costs comfort
or a feature is a WARNING.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sandboxd.doctor import needs
from sandboxd.doctor.capacity import Limit, limits, round_up
from sandboxd.doctor.facts import Demand, Facts
from sandboxd.doctor.features import features
from sandboxd.doctor.findings import Finding, Verdict, compare, compare_bytes, gibibytes


def examine(facts: Facts, demands: Sequence[Demand]) -> list[Finding]:
    """All checks: what sandboxes are made with, what bounds their number, what they want besides."""
    return [
        *features(facts, demands),
        *(_bound(limit, demands) for limit in limits(facts) if _applies(limit, facts, demands)),
        *_comfort(facts, demands),
        _memory(facts, demands),
        *_disks(facts, demands),
    ]


def _applies(limit: Limit, facts: Facts, demands: Sequence[Demand]) -> bool:
    """A control group without a limit of its own is no news."""
    if limit.check == "cgroup_pids" and limit.value is None:
        return facts.groups.version > 0 and bool(facts.groups.pids_group)
    return any(limit.need[demand.kind] for demand in demands) or limit.check == "user_namespaces"


def _bound(limit: Limit, demands: Sequence[Demand]) -> Finding:
    wanted = limit.wanted(demands)
    return compare(
        limit.check, limit.title, limit.value, wanted, fix=limit.cure(wanted), short=Verdict.FAILURE
    )


def _comfort(facts: Facts, demands: Sequence[Demand]) -> Iterator[Finding]:
    """What programs in the sandboxes, or many callers, would miss. Each: name, title, value, needed."""
    read = facts.sysctl.get
    callers = min(sum(demand.count for demand in demands), needs.BACKLOG_MOST)
    files = needs.DAEMON_FILES_KEPT + _sum(needs.DAEMON_FILES, demands)
    for check, name, needed in (
        ("nr_open", "fs.nr_open", files),
        ("inotify_instances", "fs.inotify.max_user_instances", _sum(needs.INOTIFY_INSTANCES, demands)),
        ("inotify_watches", "fs.inotify.max_user_watches", _sum(needs.INOTIFY_WATCHES, demands)),
        ("terminals", "kernel.pty.max", needs.TERMINALS_KEPT + _sum(needs.TERMINALS, demands)),
        ("backlog", "net.core.somaxconn", max(needs.BACKLOG, callers)),
    ):
        yield compare(check, TITLES[check], read(name), needed, fix=f"sysctl -w {name}={round_up(needed)}")
    for family, name in enumerate(NEIGHBOUR_TABLES):
        used = facts.neighbours[family] if facts.neighbours else 0
        needed = used + needs.NEIGHBOURS_KEPT + _sum(needs.NEIGHBOURS, demands)
        check = f"neighbours_{name}"
        key = f"net.{name}.neigh.default.gc_thresh3"
        yield compare(check, TITLES[check], read(key), needed, fix=f"sysctl -w {key}={round_up(needed)}")
    yield _tasks_at_most(facts, demands)


NEIGHBOUR_TABLES = ("ipv4", "ipv6")
TITLES = {
    "nr_open": "open files that a process may be allowed (fs.nr_open)",
    "inotify_instances": "file watchers of all sandboxes (fs.inotify.max_user_instances)",
    "inotify_watches": "files they watch (fs.inotify.max_user_watches)",
    "terminals": "terminals (kernel.pty.max)",
    "backlog": "connections waiting at a socket (net.core.somaxconn)",
    "neighbours_ipv4": "neighbour table, IPv4 (gc_thresh3)",
    "neighbours_ipv6": "neighbour table, IPv6 (gc_thresh3)",
}


def _tasks_at_most(facts: Facts, demands: Sequence[Demand]) -> Finding:
    """Sandboxes that all fork to their own limit must not leave the host without process numbers."""
    known = {name: facts.sysctl[name] for name in PROCESS_LIMITS if name in facts.sysctl}
    bounded = [demand.count * (demand.pids + 1) for demand in demands if demand.pids is not None]
    needed = (facts.tasks or 0) + needs.PIDS_KEPT + sum(bounded)
    value = min(known.values(), default=None)
    short = [f"{name}={round_up(needed)}" for name, value in known.items() if value < needed]
    fix = f"sysctl -w {' '.join(short)}; or lower limits.pids"
    title = "processes if every sandbox takes its limits.pids"
    return compare("tasks_at_limits", title, value, needed, fix=fix)


PROCESS_LIMITS = ("kernel.pid_max", "kernel.threads-max")


def _memory(facts: Facts, demands: Sequence[Demand]) -> Finding:
    room = facts.memory_available
    if room is not None and facts.groups.memory_room is not None:
        room = min(room, facts.groups.memory_room)
    limits_sum = sum(demand.count * demand.memory_bytes for demand in demands if demand.memory_bytes)
    return compare_bytes(
        "memory",
        f"memory (limits.memory_bytes add up to {gibibytes(limits_sum)})",
        room,
        _sum(needs.MEMORY_BYTES, demands),
        fix="lower size_limit, or end what else takes memory here",
    )


def _disks(facts: Facts, demands: Sequence[Demand]) -> Iterator[Finding]:
    for directory in facts.directories:
        if directory.setting == "images_dir":
            continue
        kept_in_docker = directory.setting == DOCKER_ROOT
        ours = [demand for demand in demands if (demand.backend == "docker") == kept_in_docker]
        if not ours:
            continue
        where = f"{directory.setting} ({directory.path}, {directory.kind or 'unknown file system'})"
        fix = f"free some space in {directory.path}" + (
            "" if kept_in_docker else ", or name another state_dir"
        )
        name = directory.setting.replace(" ", "_")
        room, inodes = directory.free_bytes, directory.free_inodes
        yield compare_bytes(f"disk_{name}", f"disk of {where}", room, _sum(needs.DISK_BYTES, ours), fix=fix)
        needed = _sum(needs.DISK_INODES, ours)
        yield compare(f"inodes_{name}", f"inodes of {where}", inodes, needed, fix=fix)


DOCKER_ROOT = "docker root"


def _sum(need: needs.Need, demands: Sequence[Demand]) -> int:
    return sum(demand.count * need[demand.kind] for demand in demands)
