"""Control groups against trees of plain directories, and against this host's own where there are any."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxd.backends import cgroup
from sandboxd.backends.steps import GROUP, INHERITED, KILLS, LIMIT, PEAK

from .starter_kit import Bench

LIMITS = {"memory_bytes": float(64 << 20), "pids": 10.0, "cpu_count": 0.5}


def tree_v2(root: Path, *, available: str, enabled: str) -> Path:
    """A version 2 tree with our own group in it, as a delegating service manager leaves it."""
    own = root / "service"
    own.mkdir(parents=True)
    (root / "cgroup.controllers").write_text("cpu memory pids io")
    (own / "cgroup.controllers").write_text(available)
    (own / "cgroup.subtree_control").write_text(enabled)
    return own


def tree_v1(root: Path) -> None:
    for controllers in ("memory", "pids", "cpu,cpuacct", "freezer"):
        (root / controllers / "own").mkdir(parents=True)


OWN_V1 = "4:memory:/own\n3:pids:/own\n2:cpu,cpuacct:/own\n1:freezer:/own\n0::/\n"


def group(path: Path, controllers: str) -> None:
    """A group as the kernel makes it: a plain directory has to be told what it hands on."""
    path.mkdir(parents=True)
    (path / "cgroup.subtree_control").write_text(controllers)


def test_version_2_takes_what_is_handed_on(tmp_path: Path) -> None:
    own = tree_v2(tmp_path, available="memory pids", enabled="memory pids")
    (tmp_path / "cgroup.controllers").write_text("memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    group(own / "mine", "memory pids")
    found = cgroup.find(str(tmp_path), "0::/service\n", "mine")
    assert found == [(2, str(own / "mine"), ("memory", "pids"))]
    assert cgroup.settle(found) == found
    assert (own / "mine/_launcher/cgroup.procs").read_text() == "0"


def test_version_2_looks_above_a_group_that_hands_nothing_on(tmp_path: Path) -> None:
    tree_v2(tmp_path, available="", enabled="")
    (tmp_path / "cgroup.controllers").write_text("memory pids cpu")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids cpu")
    group(tmp_path / "mine", "memory pids cpu")
    found = cgroup.find(str(tmp_path), "0::/service\n", "mine")
    assert found == [(2, str(tmp_path / "mine"), ("memory", "pids", "cpu"))]


def test_what_a_killed_launcher_left_goes_and_its_directory_stays(tmp_path: Path) -> None:
    """A directory that is removed and made anew hands on nothing, and no limit could be set below it."""
    own = tree_v2(tmp_path, available="memory pids", enabled="memory pids")
    group(own / "mine", "memory pids")
    found = cgroup.find(str(tmp_path), "0::/service\n", "mine")
    (own / "mine/sandbox").mkdir()
    cgroup.sweep(found)
    assert [path.name for path in (own / "mine").iterdir()] == ["cgroup.subtree_control"]
    assert (own / "mine/cgroup.subtree_control").read_text() == "memory pids"


def test_version_2_hands_nothing_on_where_processes_live(tmp_path: Path) -> None:
    """It would be refused for memory, and make a group of threads of it for the others."""
    own = tree_v2(tmp_path, available="memory pids cpu", enabled="")
    (own / "cgroup.type").write_text("domain")
    (own / "cgroup.procs").write_text("1\n")
    (tmp_path / "cgroup.controllers").write_text("memory pids cpu")
    (tmp_path / "cgroup.subtree_control").write_text("memory pids cpu")
    group(tmp_path / "mine", "memory pids cpu")
    found = cgroup.find(str(tmp_path), "0::/service\n", "mine")
    assert found == [(2, str(tmp_path / "mine"), ("memory", "pids", "cpu"))]
    assert (own / "cgroup.subtree_control").read_text() == ""


def test_processes_of_a_delegated_group_make_room_where_nothing_above_is_ours(tmp_path: Path) -> None:
    own = tree_v2(tmp_path, available="memory pids", enabled="")
    (own / "cgroup.procs").write_text("41\n")
    group(own / "mine", "")
    found = cgroup.find(str(tmp_path), "0::/service\n", "mine")
    assert (own / "_daemon/cgroup.procs").read_text() == "41"
    assert found == []  # A plain directory keeps its processes, and so hands on nothing.


def test_version_2_without_delegation_is_none(tmp_path: Path) -> None:
    tree_v2(tmp_path, available="", enabled="")
    assert cgroup.find(str(tmp_path), "0::/service\n", "mine") == []


def test_version_1_takes_each_hierarchy_that_limits(tmp_path: Path) -> None:
    tree_v1(tmp_path)
    found = cgroup.find(str(tmp_path), OWN_V1, "mine")
    assert found == [
        (1, str(tmp_path / "memory/own/mine"), ("memory",)),
        (1, str(tmp_path / "pids/own/mine"), ("pids",)),
        (1, str(tmp_path / "cpu,cpuacct/own/mine"), ("cpu",)),
    ]
    assert all(Path(directory).is_dir() for _, directory, _ in found)
    cgroup.remove(found)
    assert not any(Path(directory).exists() for _, directory, _ in found)


def test_a_tree_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert cgroup.find(str(tmp_path / "none"), OWN_V1, "mine") == []


def test_values_that_are_written() -> None:
    two = cgroup.settings(2, ("memory", "pids", "cpu"), LIMITS)
    assert ("memory.max", "67108864", False) in two
    assert ("memory.swap.max", "0", True) in two
    assert ("pids.max", "11", False) in two  # PID 1 is ours.
    assert ("cpu.max", "50000 100000", False) in two
    one = cgroup.settings(1, ("memory",), LIMITS)
    assert [name for name, _, _ in one] == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    assert cgroup.settings(1, ("cpu",), LIMITS)[1] == ("cpu.cfs_quota_us", "50000", False)
    assert cgroup.settings(2, ("memory", "pids", "cpu"), {}) == []
    assert cgroup.settings(1, ("pids",), {"memory_bytes": 1.0}) == []


def test_remains_of_a_dead_launcher_are_swept(tmp_path: Path) -> None:
    tree_v1(tmp_path)
    found = cgroup.find(str(tmp_path), OWN_V1, "mine")
    for _, directory, _ in found:
        (Path(directory) / "sandbox").mkdir()
    cgroup.remove(found)
    assert not any(Path(directory).exists() for _, directory, _ in found)
    cgroup.remove(found)


def test_a_group_is_made_limited_and_entered(tmp_path: Path) -> None:
    own = tree_v2(tmp_path, available="memory pids", enabled="memory pids")
    group(own / "mine", "memory pids")
    groups = cgroup.Cgroups(cgroup.find(str(tmp_path), "0::/service\n", "mine"))
    assert groups.prepare("sandbox", LIMITS) == [
        ("mkdir", INHERITED, "sandbox", 0o755),
        ("open", INHERITED, "sandbox", os.O_RDONLY | os.O_DIRECTORY, GROUP, False),
        ("write", GROUP, "memory.max", "67108864", False),
        ("write", GROUP, "memory.swap.max", "0", True),
        ("write", GROUP, "memory.oom.group", "0", True),
        ("write", GROUP, "pids.max", "11", False),
        ("into", GROUP),
    ]
    assert groups.enter("sandbox", LIMITS) == [
        ("join", GROUP),
        ("open", GROUP, "memory.events", os.O_RDONLY, KILLS, True),
        ("open", GROUP, "memory.peak", os.O_RDONLY, PEAK, True),
        ("open", GROUP, "memory.max", os.O_RDONLY, LIMIT, True),
        ("close", GROUP),
    ]
    groups.close()


def test_a_group_is_made_in_each_hierarchy_and_left_behind(tmp_path: Path) -> None:
    """The files of a plain directory are missing: those that every kernel has are an error."""
    tree_v1(tmp_path)
    groups = cgroup.Cgroups(cgroup.find(str(tmp_path), OWN_V1, "mine"))
    assert groups.enforced == {"memory", "pids", "cpu"}
    with Bench(inherited=groups.descriptors) as bench:
        assert groups.prepare("sandbox", LIMITS) == []
        failed = bench.failure(groups.enter("sandbox", LIMITS))
    assert failed == "No such file or directory: write memory.limit_in_bytes 67108864"
    joins = [step for step in groups.enter("sandbox", LIMITS) if step[2:] == ("tasks", "0", False)]
    assert len(joins) == 3, "as one thread, or all that begin and end wait for each start"
    made = [directory.name for directory in tmp_path.glob("*/own/mine/sandbox")]
    assert made == ["sandbox"]
    groups.remove("sandbox")
    assert not (tmp_path / "memory/own/mine/sandbox").exists()
    groups.close()
