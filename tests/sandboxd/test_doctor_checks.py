"""What the doctor makes of facts: verdicts, needed values, cures, and the pools' shares of a host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.doctor import needs
from sandboxd.doctor.capacity import Capacity, Limit, limits, round_up, shares
from sandboxd.doctor.checks import DOCKER_ROOT, examine
from sandboxd.doctor.facts import UNLIMITED, Demand, Directory, Engine, Facts, Groups
from sandboxd.doctor.findings import Finding, Verdict, worst

DOCS = Path(__file__).parent.parent.parent / "docs"
N = 960
POOL = Demand("python", "namespace", N)
CONTAINERS = Demand("boxes", "docker", N)
SYSCTL = {
    "kernel.pid_max": 4194304,
    "kernel.threads-max": 1000000,
    "kernel.pty.max": 4096,
    "fs.file-max": UNLIMITED,
    "fs.nr_open": 1048576,
    "fs.mount-max": 100000,
    "fs.inotify.max_user_instances": 8192,
    "fs.inotify.max_user_watches": 1000000,
    "net.core.somaxconn": 4096,
    "net.ipv4.neigh.default.gc_thresh3": 8192,
    "net.ipv6.neigh.default.gc_thresh3": 8192,
    **{
        f"user.max_{kind}_namespaces": 96365 for kind in ("user", "pid", "mnt", "net", "ipc", "uts", "cgroup")
    },
}
GROUPS = Groups(2, frozenset({"cpu", "memory", "pids"}), UNLIMITED, 0, "/sys/fs/cgroup", UNLIMITED)
STATE = Directory("state_dir", "/run/sandboxd", "tmpfs", 64 << 30, UNLIMITED, "")
IMAGES = Directory("images_dir", "/var/lib/sandboxd", "ext4", 64 << 30, UNLIMITED, "")
ROOMY = Facts(
    root=True,
    has_users=True,
    sysctl=SYSCTL,
    open_files=1048576,
    processes=UNLIMITED,
    tasks=200,
    files=2000,
    mounts=30,
    memory_available=64 << 30,
    has_overlay=True,
    groups=GROUPS,
    directories=(STATE, IMAGES),
    neighbours=(2, 5),
    bridges={"docker0": 3},
    namespaces="",
    engine=Engine("", "28.0", ("runc", "runsc"), "overlay2", "systemd", "/var/lib/docker"),
)


def found(facts: Facts, *demands: Demand) -> dict[str, Finding]:
    return {finding.check: finding for finding in examine(facts, demands or (POOL,))}


def less(**values: int) -> Facts:
    """The roomy host with some of its switches turned down; `__` stands for a dot, `_` stays."""
    return replace(
        ROOMY, sysctl={**SYSCTL, **{name.replace("__", "."): value for name, value in values.items()}}
    )


def test_a_roomy_host_is_well_for_every_backend() -> None:
    demands = (POOL, CONTAINERS, Demand("fake", "fake", 64))
    assert {check: finding for check, finding in found(ROOMY, *demands).items() if finding.fix} == {}
    assert worst(examine(ROOMY, demands)) is Verdict.OK


TIGHT = [
    ("pid_max", less(kernel__pid_max=2000), "sysctl -w kernel.pid_max=8192"),
    ("threads_max", replace(ROOMY, sysctl={**SYSCTL, "kernel.threads-max": 3000}), "kernel.threads-max=8192"),
    ("cgroup_pids", replace(ROOMY, groups=replace(GROUPS, pids_max=500, pids_now=9)), "TasksMax=4049"),
    ("processes", replace(ROOMY, processes=1000), "ulimit -Hu 3904"),
    ("open_files", replace(ROOMY, open_files=1024), "ulimit -Hn 2944"),
    ("file_max", replace(ROOMY, sysctl={**SYSCTL, "fs.file-max": 10000}), "sysctl -w fs.file-max=65536"),
    ("namespaces", less(user__max_net_namespaces=500), "sysctl -w user.max_net_namespaces=1024"),
    ("user_namespaces", replace(less(user__max_user_namespaces=500), has_users=False), "=1024"),
]


@pytest.mark.parametrize(("check", "facts", "cure"), TIGHT, ids=[check for check, _, _ in TIGHT])
def test_what_binds_the_number_is_a_failure_and_bounds_the_pool(check: str, facts: Facts, cure: str) -> None:
    findings = found(facts)
    assert findings[check].verdict is Verdict.FAILURE
    assert cure in findings[check].fix
    assert {name for name, each in findings.items() if each.verdict is Verdict.FAILURE} == {check}
    share = shares(limits(facts), [POOL])["python"]
    assert 1 <= share.count < N
    assert share.limit is not None
    assert share.limit.check == check
    # As many as it says are carried, and not one more.
    assert share.limit.wanted([replace(POOL, count=share.count)]) <= (share.limit.value or 0)
    assert share.limit.wanted([replace(POOL, count=share.count + 1)]) > (share.limit.value or 0)


def test_containers_mount_in_the_hosts_own_namespace() -> None:
    facts = replace(ROOMY, sysctl={**SYSCTL, "fs.mount-max": 1000})
    assert found(facts, CONTAINERS)["mount_max"].verdict is Verdict.FAILURE
    assert shares(limits(facts), [CONTAINERS])["boxes"].count == (1000 - 30 - needs.MOUNTS_KEPT) // 2
    assert shares(limits(facts), [POOL])["python"].count == N


def test_a_kernel_for_each_container_takes_more_process_numbers() -> None:
    """480 of gVisor's on 32,768 numbers had the Engine itself fail, which took all of them with it."""
    facts = replace(ROOMY, sysctl={**SYSCTL, "kernel.pid_max": 32768})
    gvisor = replace(CONTAINERS, count=480, runtime="runsc")
    share = shares(limits(facts), [gvisor])["boxes"]
    assert (share.limit and share.limit.check) == "pid_max"
    assert 300 < share.count < 400
    others = replace(gvisor, runtime="runc")
    assert shares(limits(facts), [others])["boxes"].count == 480


COMFORT = [
    ("nr_open", less(fs__nr_open=1024)),
    ("inotify_instances", less(fs__inotify__max_user_instances=128)),
    ("inotify_watches", less(fs__inotify__max_user_watches=8192)),
    ("terminals", less(kernel__pty__max=1500)),
    ("backlog", less(net__core__somaxconn=128)),
    ("neighbours_ipv4", less(net__ipv4__neigh__default__gc_thresh3=1024)),
    ("neighbours_ipv6", less(net__ipv6__neigh__default__gc_thresh3=1024)),
    ("tasks_at_limits", less(kernel__pid_max=32768)),
    ("memory", replace(ROOMY, memory_available=2 << 30)),
    ("memory", replace(ROOMY, groups=replace(GROUPS, memory_room=1 << 30))),
    ("disk_state_dir", replace(ROOMY, directories=(replace(STATE, free_bytes=1 << 20), IMAGES))),
    ("inodes_state_dir", replace(ROOMY, directories=(replace(STATE, free_inodes=100), IMAGES))),
    ("cgroups", replace(ROOMY, groups=replace(GROUPS, enforced=frozenset({"memory", "pids"})))),
    ("overlay_images_dir", replace(ROOMY, directories=(STATE, replace(IMAGES, overlay="refused")))),
]


@pytest.mark.parametrize(("check", "facts"), COMFORT)
def test_what_costs_a_feature_is_a_warning_and_bounds_nothing(check: str, facts: Facts) -> None:
    findings = found(facts)
    assert {name for name, each in findings.items() if each.verdict is not Verdict.OK} == {check}
    assert findings[check].verdict is Verdict.WARNING
    assert findings[check].fix
    assert shares(limits(facts), [POOL])["python"].count == N


@pytest.mark.parametrize(
    ("facts", "check", "words"),
    [
        (replace(ROOMY, platform="darwin"), "platform", "docker"),
        (replace(ROOMY, has_overlay=False), "overlay", "modprobe overlay"),
        (
            replace(ROOMY, directories=(replace(STATE, overlay="no"),)),
            "overlay_state_dir",
            "another state_dir",
        ),
        (replace(ROOMY, namespaces="Operation not permitted"), "can_unshare", "--privileged"),
        (replace(less(user__max_user_namespaces=0), namespaces="No space"), "can_unshare", "=16384"),
        (
            replace(less(kernel__unprivileged_userns_clone=0), namespaces="refused"),
            "can_unshare",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (
            replace(less(kernel__apparmor_restrict_unprivileged_userns=1), root=False, namespaces="refused"),
            "can_unshare",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ],
)
def test_what_no_sandbox_is_made_without_is_a_failure(facts: Facts, check: str, words: str) -> None:
    assert found(facts)[check].verdict is Verdict.FAILURE
    assert words in found(facts)[check].fix


def test_an_image_makes_the_images_directory_needed() -> None:
    facts = replace(ROOMY, directories=(STATE, replace(IMAGES, overlay="refused")))
    assert found(facts, replace(POOL, image="py312"))["overlay_images_dir"].verdict is Verdict.FAILURE


def test_docker_is_needed_where_a_pool_uses_it() -> None:
    gone = replace(ROOMY, engine=Engine("it does not answer"))
    assert found(gone)["docker"].verdict is Verdict.OK
    assert found(gone, CONTAINERS)["docker"].verdict is Verdict.FAILURE
    assert found(replace(ROOMY, engine=None), CONTAINERS)["docker"].verdict is Verdict.UNKNOWN
    kata = found(ROOMY, replace(CONTAINERS, runtime="kata"))["docker_runtimes"]
    assert (kata.verdict, kata.needed) == (Verdict.FAILURE, "kata")
    poor = replace(ROOMY, engine=Engine("", "28.0", ("runc",), "vfs", "none", ""))
    assert found(poor, CONTAINERS)["docker_storage"].verdict is Verdict.WARNING
    assert found(poor, CONTAINERS)["docker_limits"].verdict is Verdict.WARNING


def test_nothing_known_is_unknown_and_bounds_nothing() -> None:
    findings = examine(Facts(directories=(Directory("state_dir", "/run"),)), [POOL, CONTAINERS])
    verdicts = {finding.check: finding.verdict for finding in findings}
    assert verdicts.pop("platform") is Verdict.OK
    assert verdicts.pop("cgroups") is Verdict.WARNING  # none are known, none are used
    assert set(verdicts.values()) == {Verdict.UNKNOWN}
    assert {share.count for share in shares(limits(Facts()), [POOL, CONTAINERS]).values()} == {N}


def test_root_counts_none_of_its_own_processes_against_its_sandboxes() -> None:
    user = replace(ROOMY, root=False, has_users=False, own_tasks=300)
    assert found(user)["processes"].needed_value == 300 + (found(ROOMY)["processes"].needed_value or 0)


@pytest.mark.parametrize(("value", "up"), [(1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)])
def test_sysctls_are_set_to_powers_of_two(value: int, up: int) -> None:
    assert round_up(value) == up


LIMIT = Limit("x", "x", 100, 10, {"namespace": 3, "docker": 1, "fake": 0}, lambda value: f"{value}")


def test_small_pools_keep_what_they_ask_and_large_ones_are_cut_alike() -> None:
    demands = [Demand("a", "namespace", 5), Demand("b", "namespace", 1000), Demand("c", "namespace", 1000)]
    given_to = shares([LIMIT], demands)
    assert {name: share.count for name, share in given_to.items()} == {"a": 5, "b": 12, "c": 12}
    assert given_to["a"].limit is None
    assert given_to["b"].limit is LIMIT
    unbound = shares([LIMIT], [Demand("f", "fake", 5000)])
    assert unbound["f"].count == 5000


def test_a_pool_that_is_resized_gets_what_the_others_leave() -> None:
    capacity = Capacity([LIMIT], [Demand("a", "namespace", 10), Demand("b", "docker", 30)])
    assert capacity.shares["b"].count == 30
    share = capacity.resize("b", 100)
    assert (share.count, share.limit) == (60, LIMIT)
    assert capacity.resize("a", 20).count == 10
    assert capacity.resize("b", 6).limit is None
    assert capacity.resize("a", 100).count == 28


POOLS = st.lists(
    st.tuples(st.sampled_from(["namespace", "docker", "fake"]), st.integers(1, 3000)), min_size=1, max_size=6
)


@given(POOLS, st.integers(0, 5000))
def test_shares_fit_and_waste_little(pools: list[tuple[str, int]], value: int) -> None:
    demands = [Demand(f"p{n}", backend, count) for n, (backend, count) in enumerate(pools)]
    limit = replace(LIMIT, value=value)
    given_to = shares([limit], demands)
    used = sum(given_to[demand.pool].count * limit.need[demand.backend] for demand in demands)
    assert all(1 <= given_to[demand.pool].count <= demand.count for demand in demands)
    if all(share.count > 1 for share in given_to.values() if share.limit):
        assert used <= limit.room or all(share.limit is None for share in given_to.values())
    if used < limit.room and any(share.limit for share in given_to.values()):
        # What is left is less than one sandbox more for each pool that was cut.
        cut = [demand for demand in demands if given_to[demand.pool].limit]
        assert used + sum(limit.need[demand.backend] for demand in cut) > limit.room


def test_the_documentation_names_every_check_and_its_needs() -> None:
    """One row for each in docs/operations.md, with what each backend takes of what bounds pools."""
    rows = [line for line in (DOCS / "operations.md").read_text().splitlines() if line.startswith("| `")]
    docker_root = Directory(DOCKER_ROOT, "/var/lib/docker", "ext4", 64 << 30, UNLIMITED)
    facts = replace(ROOMY, has_users=False, directories=(STATE, IMAGES, docker_root))
    for check in found(facts, POOL, CONTAINERS, Demand("fake", "fake", 1)):
        assert any(f"`{check}`" in row for row in rows), check
    for limit in limits(facts):
        (row,) = (row for row in rows if row.startswith(f"| `{limit.check}` |"))
        taken = ", ".join(str(limit.need[backend]) for backend in ("namespace", "docker", "fake"))
        assert row.split("|")[3].strip().startswith(taken), limit.check
