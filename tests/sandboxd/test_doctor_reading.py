"""What the doctor reads of a host: small copies of /proc and /sys, whole, broken and missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxd.doctor.capacity import limits, shares
from sandboxd.doctor.facts import UNLIMITED, Demand, Facts
from sandboxd.doctor.reading import read, read_directory

POOL = Demand("python", "namespace", 960)
LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max processes             1000                 {processes}                processes
Max open files            1024                 {files}                files
"""
STATUS = "Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nThreads:\t{threads}\n"
MOUNTS = """1 0 8:1 / / rw,relatime - ext4 /dev/sda rw
2 1 0:5 / /run rw shared:1 - tmpfs tmpfs rw
3 2 0:6 / {spaced} rw master:2 propagate_from:1 - xfs /dev/sdb rw
"""


class Host:
    """A root directory with some files of a host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> Host:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self

    def limits(self, *, files: str = "1048576", processes: str = "unlimited") -> Host:
        return self.write("proc/self/limits", LIMITS.format(files=files, processes=processes))

    def process(self, name: str, uid: int, threads: int) -> Host:
        return self.write(f"proc/{name}/status", STATUS.format(uid=uid, threads=threads))

    def read(self) -> Facts:
        return read(self.root)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_an_empty_root_is_all_unknown(host: Host) -> None:
    facts = host.read()
    assert facts.sysctl == {}
    assert (facts.open_files, facts.processes, facts.tasks, facts.files, facts.mounts) == (None,) * 5
    assert (facts.memory_available, facts.has_overlay, facts.neighbours) == (None, None, None)
    assert facts.groups.version == 0
    assert shares(limits(facts), [POOL])["python"].limit is None


@pytest.mark.parametrize("text", ["", "\n", "what\n", "-1\n", "\udcff"])
def test_broken_files_are_unknown(host: Host, text: str) -> None:
    names = ("kernel/pid_max", "fs/file-max", "fs/file-nr", "user/max_net_namespaces")
    for name in names:
        path = host.root / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode(errors="surrogateescape"))
    for name in ("loadavg", "meminfo", "net/stat/arp_cache", "self/limits", "self/status", "self/cgroup"):
        host.write(f"proc/{name}", "Max open files\nUid:\nMemAvailable:\nx:y\n1 2 3 4\n\n")
    facts = host.read()
    assert facts.sysctl == {}
    assert (facts.open_files, facts.tasks, facts.files, facts.memory_available) == (None,) * 4


def test_the_numbers_of_a_host(host: Host) -> None:
    host.limits(files="20000", processes="96365")
    host.write("proc/sys/kernel/pid_max", "32768\n").write("proc/sys/fs/file-nr", "512\t0\t2466170\n")
    host.write("proc/sys/net/ipv6/neigh/default/gc_thresh3", "1024\n")
    host.write("proc/loadavg", "0.36 0.60 1.51 1/188 9312\n")
    host.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   2048 kB\n")
    host.write("proc/filesystems", "nodev\tproc\nnodev\toverlay\n\text4\n")
    table = "entries  allocs\n0000001f 00000003\n0000001f 0000000b\n"
    host.write("proc/net/stat/arp_cache", table).write("proc/net/stat/ndisc_cache", table)
    host.write("sys/class/net/br0/brif/veth1/port_no", "1").write("sys/class/net/br0/brif/veth2/port_no", "2")
    host.write("sys/class/net/eth0/mtu", "1500")
    facts = host.read()
    assert (facts.open_files, facts.processes, facts.tasks, facts.files) == (20000, 96365, 188, 512)
    assert facts.sysctl == {"kernel.pid_max": 32768, "net.ipv6.neigh.default.gc_thresh3": 1024}
    assert (facts.memory_available, facts.has_overlay, facts.neighbours) == (2048 * 1024, True, (31, 31))
    assert facts.bridges == {"br0": 2}


@pytest.mark.parametrize(
    ("files", "processes", "carried", "bound_by"),
    [
        ("unlimited", "unlimited", 960, None),
        ("256", "unlimited", (256 - 64) // 3, "open_files"),
        ("unlimited", "500", (500 - 64) // 4, "processes"),
        ("65", "unlimited", 1, "open_files"),
    ],
)
def test_limits_of_the_process_bound_the_pools(
    host: Host, files: str, processes: str, carried: int, bound_by: str | None
) -> None:
    facts = host.process("self", 0, 1).limits(files=files, processes=processes).read()
    share = shares(limits(facts), [POOL])["python"]
    assert share.count == carried
    assert (share.limit.check if share.limit else None) == bound_by


def test_an_ordinary_user_shares_its_limit_with_all_it_runs(host: Host) -> None:
    host.process("self", 1000, 9).process("7", 1000, 9).process("8", 1000, 30).process("9", 0, 500)
    facts = host.write("proc/self/uid_map", "0 0 4294967295\n").read()
    assert (facts.root, facts.has_users, facts.own_tasks, facts.nested) == (False, False, 39, True)


@pytest.mark.parametrize(
    ("ranges", "has"), [("0 0 4294967295", True), ("0 100000 65536", False), ("x", False)]
)
def test_root_has_users_unless_its_container_has_few(host: Host, ranges: str, has: bool) -> None:
    facts = host.process("self", 0, 1).write("proc/self/uid_map", f"{ranges}\n").read()
    assert (facts.root, facts.has_users) == (True, has)


V1 = "8:pids:/user/me\n4:memory:/user/me\n2:cpu,cpuacct:/\n1:name=systemd:/\n0::/\n"


def test_version_1_limits_are_those_of_the_group_with_the_least_room(host: Host) -> None:
    host.write("proc/self/cgroup", V1)
    pids, memory = "sys/fs/cgroup/pids", "sys/fs/cgroup/memory"
    host.write(f"{pids}/user/me/pids.max", "max\n").write(f"{pids}/user/me/pids.current", "5\n")
    host.write(f"{pids}/user/pids.max", "700\n").write(f"{pids}/user/pids.current", "100\n")
    host.write(f"{memory}/user/me/memory.limit_in_bytes", "9223372036854771712\n")
    host.write(f"{memory}/user/memory.limit_in_bytes", "1000\n")
    host.write(f"{memory}/user/memory.usage_in_bytes", "600\n")
    host.write(f"{memory}/user/memory.stat", "cache 200\ntotal_inactive_file 150\n")
    (host.root / "sys/fs/cgroup/cpu,cpuacct").mkdir()
    groups = host.read().groups
    assert (groups.version, groups.enforced) == (1, frozenset({"cpu", "memory", "pids"}))
    assert (groups.pids_max, groups.pids_now, groups.pids_group) == (700, 100, "/sys/fs/cgroup/pids/user")
    assert groups.memory_room == 550
    share = shares(limits(host.read()), [POOL])["python"]
    assert (share.count, share.limit and share.limit.check) == ((700 - 100 - 200) // 4, "cgroup_pids")


def test_version_2_hands_on_from_a_group_without_processes(host: Host) -> None:
    host.write("proc/self/cgroup", "0::/user.slice/me.scope\n")
    base = "sys/fs/cgroup"
    host.write(f"{base}/cgroup.controllers", "cpuset cpu io memory pids\n")
    host.write(f"{base}/user.slice/cgroup.controllers", "memory pids\n")
    host.write(f"{base}/user.slice/cgroup.subtree_control", "memory\n").write(
        f"{base}/user.slice/cgroup.procs", ""
    )
    scope = f"{base}/user.slice/me.scope"
    host.write(f"{scope}/cgroup.controllers", "memory\n").write(f"{scope}/cgroup.procs", "7\n")
    host.write(f"{scope}/cgroup.subtree_control", "").write(f"{scope}/pids.max", "40\n")
    groups = host.read().groups
    assert (groups.version, groups.enforced) == (2, frozenset({"memory", "pids"}))
    assert (groups.pids_max, groups.pids_group) == (40, f"/{scope}")
    assert groups.memory_room is None


def test_no_groups_enforce_nothing(host: Host) -> None:
    assert host.write("proc/self/cgroup", "0::/\n").read().groups.enforced == frozenset()


def test_a_directory_is_that_above_which_exists(host: Host) -> None:
    host.write("proc/self/mountinfo", MOUNTS.format(spaced=f"{host.root}/a\\040b".replace(" ", "\\040")))
    (host.root / "a b").mkdir()
    directory = read_directory("state_dir", host.root / "a b" / "not" / "yet", host.root)
    assert (directory.path, directory.kind) == (f"{host.root}/a b", "xfs")
    assert (directory.free_bytes or 0) > 0 < (directory.free_inodes or 0)
    assert read_directory("state_dir", Path("/run/x"), host.root).kind == "tmpfs"
    assert read_directory("state_dir", Path("/nowhere"), host.root).kind == "ext4"


def test_this_host_can_be_read() -> None:
    facts = read(directories=[read_directory("state_dir", Path.cwd())])
    assert {"kernel.pid_max", "fs.file-max"} <= set(facts.sysctl)
    assert 0 < (facts.open_files or 0) <= UNLIMITED
    assert (facts.tasks or 0) > 0 < (facts.mounts or 0)
    assert facts.directories[0].kind
