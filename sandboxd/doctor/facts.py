"""What is known of a host. Values only: whatever could not be read is None, or missing from its mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sandboxd.doctor import needs

# Stands for every limit that is none: larger than any number that a kernel counts to.
UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class Demand:
    """What one pool asks of the host. `count` is its ceiling; `pids` and `memory_bytes` bound one sandbox."""

    pool: str
    backend: str
    count: int
    pids: int | None = 256
    memory_bytes: int | None = 512 << 20
    image: str | None = None
    runtime: str | None = None

    @property
    def kind(self) -> str:
        """What `needs` tells sandboxes apart by: the backend, and the runtime that takes more than others."""
        runsc = self.backend == "docker" and self.runtime == "runsc"
        return needs.RUNSC if runsc else self.backend


@dataclass(frozen=True, slots=True)
class Directory:
    """Where sandboxes or images lie; `path` is the nearest directory above that exists, if it does not.

    `kind` is the file system's type. `free_inodes` is UNLIMITED where they are made as they are needed.
    `overlay` is empty when an overlay could be mounted there, else says why not; None when nobody tried.
    """

    setting: str
    path: str
    kind: str | None = None
    free_bytes: int | None = None
    free_inodes: int | None = None
    overlay: str | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """The control groups that sandboxes of this user would be in.

    `version` is 0 where there are none. `enforced` are the limits that groups can hold. `pids_max` and
    `pids_now` are those of the group above that has the least room, `pids_group`; `memory_room` is in bytes.
    """

    version: int = 0
    enforced: frozenset[str] = frozenset()
    pids_max: int | None = None
    pids_now: int = 0
    pids_group: str = ""
    memory_room: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """The Docker Engine's word about itself; `fault` says why there is none."""

    fault: str = ""
    version: str = ""
    runtimes: tuple[str, ...] = ()
    storage: str = ""
    cgroup_driver: str = ""
    root: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One host at one moment, as this process sees it.

    `sysctl` is by dotted name. `open_files` and `processes` are hard limits of this process, `tasks` the
    processes and threads of the host, `own_tasks` those of this user, `files` the files open on the host.
    `has_users` says that sandboxes get users of their own. `namespaces` is as `Directory.overlay`, for the
    making of namespaces. `bridges` counts the ports in use; `neighbours` the entries for IPv4 and IPv6.
    """

    platform: str = "linux"
    root: bool = False
    has_users: bool = False
    sysctl: Mapping[str, int] = field(default_factory=dict)
    open_files: int | None = None
    processes: int | None = None
    tasks: int | None = None
    own_tasks: int | None = None
    files: int | None = None
    mounts: int | None = None
    memory_available: int | None = None
    has_overlay: bool | None = None
    groups: Groups = Groups()
    directories: tuple[Directory, ...] = ()
    neighbours: tuple[int, int] | None = None
    bridges: Mapping[str, int] = field(default_factory=dict)
    namespaces: str | None = None
    engine: Engine | None = None

    @property
    def nested(self) -> bool:
        """Each namespace sandbox has a user namespace of its own (`backends.confine.Confinement.nested`)."""
        return not self.has_users or "pids" not in self.groups.enforced
