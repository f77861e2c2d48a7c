"""Limits by control groups, version 2 where it is delegated, else version 1, else none.

`find` is called by the daemon, which may write where the launcher may not; `Cgroups` by the launcher and
the starter through descriptors of the directories, since they no longer see the host's file system.
"""

from __future__ import annotations

import errno
import os
import time

from sandboxd.backends.steps import GROUP, INHERITED, KILLS, LIMIT, PEAK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandboxd.backends.steps import Step

CPU_PERIOD_US = 100_000
# A group whose last process has just gone may be busy for a moment.
REMOVE_TRIES, REMOVE_PAUSE_SECONDS = 100, 0.005
MOVE_TRIES = 20
# Less than the first process of any sandbox takes: what the kernel has charged ahead for each processor, of
# which the next sandbox takes, and what it gives back some milliseconds after the last process.
VACANT_BYTES = 512 << 10
CONTROLLERS = ("memory", "pids", "cpu")
# By version: where the kernel tells of kills at the limit, of the most that was used, and of the limit.
MEMORY_FILES = {
    1: ("memory.oom_control", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
    2: ("memory.events", "memory.peak", "memory.max"),
}

# Where the launcher itself lives in version 2; sandboxes are named otherwise.
LAUNCHER_GROUP = "_launcher"
# Where the daemon's processes go when theirs is the one group that is delegated to its user.
DAEMON_GROUP = "_daemon"

# A hierarchy: its version, its directory for this launcher, the controllers that it brings.
Hierarchy = tuple[int, str, tuple[str, ...]]
# A file of a group, what is written to it, and whether a kernel may lack it.
Line = tuple[str, str, bool]


def find(root: str, own: str, name: str) -> list[Hierarchy]:
    """Where groups for this launcher can be made.

    `root` is where control groups are mounted (/sys/fs/cgroup), `own` the text of /proc/self/cgroup, and
    `name` the launcher's. Makes the launcher's directory in each hierarchy; an empty list means that
    nothing is delegated to this user.
    """
    if os.path.exists(os.path.join(root, "cgroup.controllers")):
        unified = _find_v2(root, own, name)
        return [unified] if unified else []
    found: list[Hierarchy] = []
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        useful = tuple(sorted(set(controllers.split(",")) & set(CONTROLLERS)))
        directory = os.path.join(root, controllers, path.lstrip("/"), name)
        if useful and _make(directory):
            found.append((1, directory, useful))
    return found


def _find_v2(root: str, own: str, name: str) -> Hierarchy | None:
    """The nearest group from this process's own upwards that hands the most controllers on.

    None can be handed on where processes live, so the own group is rarely one. Where those above are not
    ours, but the own is (a service with `Delegate=yes` and a user), its processes make room.
    """
    paths = [line[3:] for line in own.splitlines() if line.startswith("0::")]
    path = paths[0].strip("/") if paths else ""
    best = _best_above(root, path, name)
    if (best is None or len(best[2]) < len(CONTROLLERS)) and path and _make_room(os.path.join(root, path)):
        best = _better(best, os.path.join(root, path), name)
    return best


def _best_above(root: str, path: str, name: str) -> Hierarchy | None:
    best: Hierarchy | None = None
    while True:
        best = _better(best, os.path.join(root, path) if path else root, name)
        if not path or (best and len(best[2]) == len(CONTROLLERS)):
            return best
        path = os.path.dirname(path)


def _better(best: Hierarchy | None, parent: str, name: str) -> Hierarchy | None:
    """`best`, or the launcher's directory below `parent`, made there, when more controllers are handed on."""
    available = _read(os.path.join(parent, "cgroup.controllers")).split()
    enabled = _enable(parent, [controller for controller in CONTROLLERS if controller in available])
    directory = os.path.join(parent, name)
    if len(enabled) <= (len(best[2]) if best else 0) or not _make(directory):
        return best
    if best:
        remove([best])
    return (2, directory, tuple(_enable(directory, enabled)))


def _make_room(own: str) -> bool:
    """Moves the processes of a group that is delegated to this user into one below it."""
    members = os.path.join(own, "cgroup.procs")
    if not os.access(members, os.W_OK) or not _make(os.path.join(own, DAEMON_GROUP)):
        return False
    for _ in range(MOVE_TRIES):
        # Again, for those that were started by one that had not been moved yet.
        found = _read(members).split()
        if not found:
            break
        for pid in found:
            try:
                _write(os.path.join(own, DAEMON_GROUP, "cgroup.procs"), pid)
            except OSError:
                continue  # It has ended, or is found again.
    return True


def settle(hierarchies: list[Hierarchy]) -> list[Hierarchy]:
    """Moves the calling process below the launcher's directories; returns those where it may be.

    Version 2 lets a process be moved only by who may write in the group above both places, and the
    launcher may write in no group above its own directory.
    """
    usable = []
    for version, directory, brings in hierarchies:
        if version == 2:
            leaf = os.path.join(directory, LAUNCHER_GROUP)
            try:
                os.makedirs(leaf, exist_ok=True)
                _write(os.path.join(leaf, "cgroup.procs"), "0")
            except OSError:
                continue
        usable.append((version, directory, brings))
    return usable


def _enable(directory: str, wanted: list[str]) -> list[str]:
    """Hands controllers on to the groups below; returns those that are.

    Not where processes live: the kernel refuses it for memory, and by allowing it for the others makes the
    group one of threads.
    """
    control = os.path.join(directory, "cgroup.subtree_control")
    enabled = _read(control).split()
    is_root = not os.path.exists(os.path.join(directory, "cgroup.type"))
    if is_root or not _read(os.path.join(directory, "cgroup.procs")).strip():
        for controller in [controller for controller in wanted if controller not in enabled]:
            try:
                _write(control, f"+{controller}")
            except OSError:
                continue  # Not ours to hand on.
        enabled = _read(control).split()
    return [controller for controller in wanted if controller in enabled]


def _make(directory: str) -> bool:
    try:
        os.mkdir(directory, 0o755)
    except FileExistsError:
        pass
    except OSError:
        return False
    return os.access(directory, os.W_OK)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def give(hierarchies: list[Hierarchy], uid: int) -> None:
    """Lets the launcher's user make groups in its directories."""
    for version, directory, _ in hierarchies:
        files = ["", "cgroup.procs"] + (["cgroup.subtree_control"] if version == 2 else ["tasks"])
        for file in files:
            path = os.path.join(directory, file) if file else directory
            if os.path.exists(path):
                os.chown(path, uid, uid)


def sweep(hierarchies: list[Hierarchy]) -> None:
    """Removes all that is left in the launcher's directories, which stay as they were found."""
    for _, directory, _ in hierarchies:
        for entry in list(os.scandir(directory)) if os.path.isdir(directory) else []:
            if entry.is_dir():
                _remove(entry.path)


def remove(hierarchies: list[Hierarchy]) -> None:
    """Removes the launcher's directories with all that is left in them."""
    sweep(hierarchies)
    for _, directory, _ in hierarchies:
        _remove(directory)


def _remove(path: str, dir_fd: int | None = None) -> None:
    for _ in range(REMOVE_TRIES):
        try:
            os.rmdir(path, dir_fd=dir_fd)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
        time.sleep(REMOVE_PAUSE_SECONDS)
    raise OSError(errno.EBUSY, "a control group still has processes", path)


class Cgroups:
    """A launcher's groups: one for each sandbox in each hierarchy."""

    def __init__(self, hierarchies: list[Hierarchy]) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._open = [(version, os.open(path, flags), brings) for version, path, brings in hierarchies]
        self.enforced = {controller for _, _, brings in hierarchies for controller in brings}

    @property
    def descriptors(self) -> list[int]:
        """Of the hierarchies, as the starter inherits them."""
        return [fd for _, fd, _ in self._open]

    def prepare(self, sandbox_id: str, limits: dict[str, float]) -> list[Step]:
        """What is done before there is a process: one can begin in a group of version 2, and of these there
        is one at most."""
        steps: list[Step] = []
        for parent, (version, _, brings) in enumerate(self._open, INHERITED):
            if version == 2:
                steps += _make_group(parent, sandbox_id, settings(version, brings, limits))
                steps.append(("into", GROUP))
        return steps

    def enter(
        self, sandbox_id: str, limits: dict[str, float], vacant: str = "", *, alike: bool = False
    ) -> list[Step]:
        """What takes the new process into the sandbox's groups, limited as they are to be, and opens the
        files that tell of its memory. `vacant` are groups that another one left (`leave`), with `alike` one
        with the same limits."""
        steps: list[Step] = []
        for parent, (version, _, brings) in enumerate(self._open, INHERITED):
            if version == 1:
                lines = settings(version, brings, limits)
                if vacant:
                    steps += _take_group(
                        parent, vacant_group(vacant), sandbox_id, reset(brings, lines, alike=alike)
                    )
                else:
                    steps += _make_group(parent, sandbox_id, lines)
                # As one thread, which it is. As a process (cgroup.procs) it would have the kernel hold up all
                # forks and ends of processes on the machine until each processor has taken notice: 10 ms.
                steps.append(("write", GROUP, "tasks", "0", False))
            else:
                steps.append(("join", GROUP))
            if "memory" in brings:
                for slot, name in zip((KILLS, PEAK, LIMIT), MEMORY_FILES[version], strict=True):
                    steps.append(("open", GROUP, name, os.O_RDONLY, slot, True))
            steps.append(("close", GROUP))
        return steps

    def are_vacant(self, sandbox_id: str) -> bool:
        """Whether the groups are as good as new ones, as far as a file of theirs says. Raises OSError."""
        for version, fd, brings in self._open:
            if version == 1 and "memory" in brings:
                used = int(_read_in(fd, f"{sandbox_id}/memory.usage_in_bytes"))
                return used <= VACANT_BYTES and not _read_in(fd, f"{sandbox_id}/cgroup.procs")
        return True

    def leave(self, sandbox_id: str, vacant: str) -> None:
        """Leaves the groups to another sandbox. Of version 2, where none can be renamed, it removes them.
        Raises OSError, and some may have their new name by then."""
        for version, fd, _ in self._open:
            if version == 1:
                os.rename(sandbox_id, vacant_group(vacant), src_dir_fd=fd, dst_dir_fd=fd)
            else:
                _remove(sandbox_id, fd)

    def remove(self, sandbox_id: str) -> None:
        """Removes the sandbox's groups once their processes are gone. Raises OSError when they stay."""
        for _, fd, _ in self._open:
            _remove(sandbox_id, fd)

    def close(self) -> None:
        """Lets go of the directories; the groups stay."""
        for _, fd, _ in self._open:
            os.close(fd)


def _make_group(parent: int, name: str, lines: list[Line]) -> list[Step]:
    return [("mkdir", parent, name, 0o755), *_set_up(parent, name, lines)]


def _take_group(parent: int, vacant: str, name: str, lines: list[Line]) -> list[Step]:
    return [("rename", parent, vacant, name), *_set_up(parent, name, lines)]


def _set_up(parent: int, name: str, lines: list[Line]) -> list[Step]:
    return [
        ("open", parent, name, os.O_RDONLY | os.O_DIRECTORY, GROUP, False),
        *(("write", GROUP, file, value, optional) for file, value, optional in lines),
    ]


def _read_in(directory: int, path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)


def vacant_group(vacant: str) -> str:
    """What groups are called that nobody has: no sandbox's name begins so."""
    return f"_vacant.{vacant}"


def reset(brings: tuple[str, ...], lines: list[Line], *, alike: bool) -> list[Line]:
    """What makes a group of version 1 that another sandbox left the same as a new one with these settings;
    with `alike` it had the same."""
    peak: list[Line] = [("memory.max_usage_in_bytes", "0", False)] if "memory" in brings else []
    # To write a quota also gives all of it back, that of this period, too.
    if alike:
        return [*(line for line in lines if line[0].startswith("cpu.")), *peak]
    unlimited: list[Line] = []
    if "memory" in brings:
        # This one first: the other may not be above it.
        unlimited.append(("memory.memsw.limit_in_bytes", "-1", True))
        unlimited.append(("memory.limit_in_bytes", "-1", False))
    if "pids" in brings:
        unlimited.append(("pids.max", "max", False))
    if "cpu" in brings:
        unlimited.append(("cpu.cfs_quota_us", "-1", True))
    return [*unlimited, *lines, *peak]


def settings(version: int, brings: tuple[str, ...], limits: dict[str, float]) -> list[Line]:
    """File, value, and whether a kernel may lack the file, for each limit that the hierarchy can hold."""
    lines: list[Line] = []
    memory, pids, cpu = limits.get("memory_bytes"), limits.get("pids"), limits.get("cpu_count")
    if memory is not None and "memory" in brings:
        if version == 2:
            lines += [("memory.max", f"{memory:.0f}", False), ("memory.swap.max", "0", True)]
            # The guest must survive what kills a command.
            lines += [("memory.oom.group", "0", True)]
        else:
            lines += [("memory.limit_in_bytes", f"{memory:.0f}", False)]
            lines += [("memory.memsw.limit_in_bytes", f"{memory:.0f}", True)]
    if pids is not None and "pids" in brings:
        # PID 1 is ours and does not count.
        lines.append(("pids.max", f"{pids + 1:.0f}", False))
    if cpu is not None and "cpu" in brings:
        quota = max(1000, round(cpu * CPU_PERIOD_US))
        if version == 2:
            lines.append(("cpu.max", f"{quota} {CPU_PERIOD_US}", False))
        else:
            lines += [
                ("cpu.cfs_period_us", f"{CPU_PERIOD_US}", False),
                ("cpu.cfs_quota_us", f"{quota}", False),
            ]
    return lines
