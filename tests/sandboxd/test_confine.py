"""The steps that make a sandbox, as a list: what is in it for which order, and what comes before what."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from sandboxd.backends import syscalls as sys
from sandboxd.backends.cgroup import Cgroups
from sandboxd.backends.confine import GUEST_CAPABILITIES, LOCK, LOCK_WITH_USERS, Confinement, Order
from sandboxd.backends.recipes import KINDS, Recipes
from sandboxd.backends.rootfs import BINDS, MASKED, ROOT, UID, Base
from sandboxd.backends.starter import TREE, start_order
from sandboxd.backends.steps import GROUP, KILLS, LIFELINE, LIMIT, LISTENER, OOM_SCORE, PEAK, Step, encode

LIMITS = {"memory_bytes": float(64 << 20), "pids": 10.0, "open_files": 64.0}


def base(owner: int = UID) -> Base:
    made = Base("/nowhere", [], owner, program=-1)
    made.binds = [("/ro/0", "/m/usr"), ("/ro/1", "/m/data")]
    made.masked = [(f"/m/proc/{name}", "/empty") for name in MASKED]
    return made


def confinement(*, cgroups: Cgroups | None = None, mapped_range: bool = True) -> Confinement:
    return Confinement(base(), cgroups or Cgroups([]), bytes(16), mapped_range=mapped_range)


def asked(**changes: Any) -> dict[str, Any]:
    """A request as a daemon makes it."""
    message = {
        "id": "one",
        "cwd": "/workspace",
        "limits": {},
        "host_network": False,
        "host_system": True,
        "branches": [],
        "layers": [],
    }
    return {**message, **changes}


def order(**changes: Any) -> Order:
    return Order(asked(**changes))


def unfolded(confinement: Confinement, order: Order) -> list[Step]:
    """All the steps of a sandbox's first process, blocks written out."""
    blocks = confinement.blocks()
    steps: list[Step] = []
    for step in confinement.become(order):
        steps += blocks[int(step[1])] if step[0] == "block" else [step]
    assert encode(steps)
    return steps


def names(steps: list[Step]) -> list[str]:
    return [str(step[0]) for step in steps]


def test_the_socket_is_there_before_the_process() -> None:
    assert names(confinement().prepare(order())) == ["mkdir", "listen"]


def test_each_step_comes_when_it_is_safe() -> None:
    steps = unfolded(confinement(), order(limits=LIMITS))
    done = names(steps)
    assert done[0] == "open", "first what a failure is written to"
    first = done.index

    def last(name: str) -> int:
        return len(done) - 1 - done[::-1].index(name)

    assert first("unshare") < first("mount")
    move = steps.index(("mount", ".", "/", "", sys.MS_MOVE, ""))
    assert last("mount") == move, "nothing is mounted any more once the root is in place"
    assert steps.index(("umount", TREE)) < move, "what it was made of goes first, as one"
    assert move < first("chroot") < first("workspace")
    assert last("workspace") < first("setuser"), "mounts and owners need rights"
    assert first("setuser") < first("keep") < first("drop_capabilities")
    assert done[-3:] == ["alive", "key", "seccomp"], "nothing after the filter"
    assert steps.index(("prctl", sys.PR_SET_DUMPABLE, 0)) > first("setuser"), "a change of user sets it anew"
    assert steps.index(("prctl", sys.PR_SET_PDEATHSIG, 9)) > first("drop_capabilities")


def test_only_what_serves_stays_open() -> None:
    (keep,) = [step for step in confinement().blocks()[LOCK] if step[0] == "keep"]
    assert keep[1] == bytes((LIFELINE, LISTENER, OOM_SCORE, KILLS, PEAK, LIMIT))


def test_the_network_is_the_sandboxs_own_unless_it_is_to_be_the_hosts() -> None:
    own, shared = (unfolded(confinement(), order(host_network=shared)) for shared in (False, True))
    assert own[names(own).index("unshare")] == (
        "unshare",
        sys.CLONE_NEWNS | sys.CLONE_NEWIPC | sys.CLONE_NEWUTS | sys.CLONE_NEWCGROUP | sys.CLONE_NEWNET,
    )
    assert "loopback" in names(own)
    assert not int(shared[names(shared).index("unshare")][1]) & sys.CLONE_NEWNET
    assert "loopback" not in names(shared)


@pytest.mark.parametrize("mapped_range", [True, False])
def test_without_control_groups_limits_are_the_processs_own(*, mapped_range: bool) -> None:
    steps = unfolded(confinement(mapped_range=mapped_range), order(limits=LIMITS))
    made = steps.index(("unshare", sys.CLONE_NEWUSER))
    assert ("setuser", UID) in steps[:made] if mapped_range else "setuser" not in names(steps)
    outer = UID if mapped_range else 0
    assert [step[2:4] for step in steps[made:] if step[0] == "write"] == [
        ("setgroups", "deny"),
        ("uid_map", f"{UID} {outer} 1"),
        ("gid_map", f"{UID} {outer} 1"),
    ]
    assert names(steps[made:]).count("drop_bounding") == 1, "a new user namespace began with all of them"
    assert ("setrlimit", resource.RLIMIT_NPROC, 11) in steps[made:], "not counted with other sandboxes"
    assert ("setrlimit", resource.RLIMIT_AS, 64 << 20) in steps
    assert ("setrlimit", resource.RLIMIT_NOFILE, 64) in steps


def test_control_groups_are_entered_before_memory_is_used(tmp_path: Path) -> None:
    cgroups = Cgroups([(1, str(tmp_path), ("memory", "pids"))])
    steps = unfolded(confinement(cgroups=cgroups), order(limits=LIMITS))
    cgroups.close()
    assert steps.index(("write", GROUP, "tasks", "0", False)) < names(steps).index("unshare")
    assert ("open", GROUP, "memory.oom_control", os.O_RDONLY, KILLS, True) in steps
    kinds = [step[1] for step in steps if step[0] == "setrlimit"]
    assert kinds == [resource.RLIMIT_CORE, resource.RLIMIT_NOFILE]
    assert ("unshare", sys.CLONE_NEWUSER) not in steps


def test_an_image_lies_over_what_every_sandbox_has_and_a_branch_over_that() -> None:
    def overlay(**changes: Any) -> str:
        steps = unfolded(confinement(), order(**changes))
        (found,) = [step for step in steps if step[:2] == ("mount", "overlay")]
        return str(found[5]).split(",")[0]

    assert overlay() == "lowerdir=/t/skel"
    assert overlay(layers=["b", "a"], host_system=False) == "lowerdir=/t/bare:/t/l/b:/t/l/a"
    assert overlay(layers=["a"], branches=["y", "x"]) == (
        "lowerdir=/t/state/sandboxes/branch.y:/t/state/sandboxes/branch.x:/t/l/a:/t/skel"
    )
    image = unfolded(confinement(), order(host_system=False, layers=["a"]))
    assert [step for step in image if step[1:3] == ("/ro/0", "/m/usr")] == []
    assert ("workspace", "/workspace", UID, False) in image


def test_more_layers_than_one_mount_takes_are_refused() -> None:
    with pytest.raises(OSError, match="500 layers are more than one mount takes"):
        confinement().become(order(layers=["x" * 12] * 500))


def test_a_bounded_disk_is_memory_of_that_size() -> None:
    steps = unfolded(confinement(), order(limits={"disk_bytes": 8 << 20, "memory_bytes": 64 << 20}))
    tmpfs = [step[2:6:3] for step in steps if step[:2] == ("mount", "tmpfs")]
    assert tmpfs == [
        ("/t/disk", f"mode=755,size={8 << 20}"),
        ("/m/tmp", f"mode=1777,size={8 << 20}"),
        ("/m/dev/shm", f"mode=1777,size={8 << 20}"),
    ]


def test_a_capability_that_a_program_could_bring_is_gone_before_the_first_sandbox() -> None:
    assert confinement().once() == [("drop_bounding",)]
    nested = names(unfolded(confinement(), order()))
    assert nested.index("drop_bounding") > nested.index("setuser"), "only of a user namespace of its own"


def test_only_a_guest_whose_commands_have_users_keeps_capabilities(tmp_path: Path) -> None:
    cgroups = Cgroups([(1, str(tmp_path), ("pids",))])
    made = confinement(cgroups=cgroups)
    recipes = Recipes(made)
    assert recipes.order(asked()) != recipes.order(asked(users=True)) != recipes.order(asked(users=False))
    cgroups.close()
    without, others = (unfolded(made, order(users=users)) for users in (False, True))
    assert ("drop_capabilities", 0) in without
    assert ("prctl", sys.PR_SET_KEEPCAPS, 1) not in without
    assert [step for step in others if step[0] == "drop_capabilities"] == [
        ("drop_capabilities", GUEST_CAPABILITIES)
    ]
    assert GUEST_CAPABILITIES == 0b1110_0000, "CAP_KILL, CAP_SETGID, CAP_SETUID"
    change = others.index(("setuser", UID))
    keep = ("prctl", sys.PR_SET_KEEPCAPS)
    assert others[change - 1 : change + 2] == [(*keep, 1), ("setuser", UID), (*keep, 0)]


@pytest.mark.parametrize("mapped_range", [True, False])
def test_one_user_for_all_is_never_several(*, mapped_range: bool) -> None:
    """Without a range of users, or a control group that counts their processes together."""
    with pytest.raises(OSError, match="there is one user for all"):
        confinement(mapped_range=mapped_range).become(order(users=True))


def test_the_default_workspace_is_made_once() -> None:
    def made(cwd: str) -> list[object]:
        return [step[1] for step in unfolded(confinement(), order(cwd=cwd)) if step[0] == "workspace"]

    assert made("/workspace") == ["/workspace"]
    assert made("/srv/app") == ["/workspace", "/srv/app"]


def test_what_is_the_same_for_all_is_sent_once() -> None:
    blocks = confinement().blocks()
    assert set(blocks) == {BINDS, ROOT, LOCK, LOCK_WITH_USERS}
    assert len(blocks[BINDS]) == 4
    own = confinement().become(order(limits=LIMITS))
    assert len(encode(own)) < 1500, "bytes that each start sends"


def test_an_order_that_was_worked_out_for_another_is_what_it_would_be_anew() -> None:
    recipes = Recipes(confinement())
    changes: list[dict[str, Any]] = [
        {},
        {"id": "two"},
        {"id": "\x01\x01\x01"},
        {"id": "\u00e4b"},
        {"id": "longer"},
        {"cwd": "/srv/\x01\x01\x01"},
        {"cwd": "/srv/\x01\x01\x01", "id": "two"},
        {"cwd": "/one"},
        {"cwd": "/one", "id": "two"},
        {"limits": LIMITS},
        {"limits": {**LIMITS, "disk_bytes": 1 << 20}},
        {"host_network": True},
        {"host_system": False, "layers": ["a"]},
        {"layers": ["a"], "branches": ["one"]},
        {"layers": ["a"], "branches": ["one"], "id": "two"},
        *({"id": "two", "cwd": f"/{number}"} for number in range(KINDS + 1)),
    ]
    for change in changes * 2:
        made = confinement()
        anew = start_order(made.prepare(order(**change)), made.become(order(**change)))
        assert recipes.order(asked(**change)) == anew, change
    with pytest.raises(OSError, match="a zero byte in a text"):
        recipes.order(asked(id="t\0o"))
