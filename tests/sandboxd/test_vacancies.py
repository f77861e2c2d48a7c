"""What an ended sandbox leaves to the next one: its place, which is as a new one, or nothing."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxd.backends import cgroup
from sandboxd.backends.cgroup import Cgroups
from sandboxd.backends.confine import Order
from sandboxd.backends.namespace import NamespaceBackend
from sandboxd.backends.recipes import Recipes
from sandboxd.backends.starter import start_order
from sandboxd.backends.steps import HERE, INHERITED
from sandboxd.backends.vacancies import MOST, Vacancies
from sandboxd.errors import StartFailed
from sandboxd.types import Command, ExitReason, Limits, Template

from .backend_kit import execute, shell
from .test_cgroup import LIMITS, OWN_V1, group, tree_v1, tree_v2
from .test_confine import asked, confinement, names
from .test_launcher_faults import VOLATILE, swept

PLACE = "00000001"


def test_so_many_places_are_kept() -> None:
    vacancies = Vacancies()
    assert vacancies.next({}) == ""
    assert not vacancies.alike("", {})
    vacancies.take("")
    offered = [vacancies.new_name() for _ in range(MOST) if vacancies.wanted()]
    assert len(set(offered)) == MOST
    assert not vacancies.wanted(), "those that are about to be left count"
    for number, name in enumerate(offered):
        vacancies.settled(name, None if number == 0 else {"pids": float(number % 2)})
    assert vacancies.wanted(), "one was not left"
    assert vacancies.next({"pids": 1.0}) == offered[-1], "the last one that fits"
    assert vacancies.alike(offered[-1], {"pids": 1.0})
    vacancies.take(offered[-1])
    assert vacancies.next({"pids": 1.0}) == offered[-3]
    assert vacancies.next({"pids": 7.0}) == offered[1], "the oldest, where none fits"
    assert not vacancies.alike(offered[1], {"pids": 7.0})


def test_an_order_for_a_place_is_what_it_would_be_anew() -> None:
    recipes = Recipes(confinement())
    for name, place in [
        ("one", ""),
        ("one", PLACE),
        ("two", "0000000f"),
        ("\x02" * 8, PLACE),
        ("two", ""),
    ] * 2:
        made = confinement()
        for alike in (False, True):
            order = Order(asked(id=name), place, alike=alike)
            anew = start_order(made.prepare(order), made.become(order))
            assert recipes.order(asked(id=name), place, alike=alike) == anew
    order = Order(asked(), PLACE)
    assert confinement().prepare(order)[0] == ("rename", HERE, f"vacant.{PLACE}", "one")
    assert [step[2] for step in confinement().become(order) if step[0] == "mkdir"] == [
        "/t/state/sandboxes/one/upper"
    ]
    bounded = Order(asked(limits={"disk_bytes": 1 << 20}), PLACE)
    assert names(confinement().become(bounded)).count("mkdir") == 2, "its own are in memory"


def test_groups_of_version_1_are_renamed_and_set_as_new_ones(tmp_path: Path) -> None:
    tree_v1(tmp_path)
    groups = Cgroups(cgroup.find(str(tmp_path), OWN_V1, "mine"))
    steps = groups.enter("two", {"memory_bytes": 1.0}, PLACE)
    for parent, written in (
        (
            INHERITED,
            [
                "memsw.limit_in_bytes -1",
                "limit_in_bytes -1",
                "limit_in_bytes 1",
                "memsw.limit_in_bytes 1",
                "max_usage_in_bytes 0",
            ],
        ),
        (INHERITED + 1, ["pids.max max"]),
        (INHERITED + 2, ["cpu.cfs_quota_us -1"]),
    ):
        at = steps.index(("rename", parent, f"_vacant.{PLACE}", "two"))
        lines = steps[at + 2 : at + 2 + len(written)]
        found = [f"{file!s} {text!s}".removeprefix("memory.") for _, _, file, text, _ in lines]
        assert found == written
        assert steps[at + 2 + len(written)][2] == "tasks"
    kept = groups.enter("two", {"memory_bytes": 1.0, "cpu_count": 1.0}, PLACE, alike=True)
    assert [step[2:4] for step in kept if step[0] == "write"] == [
        ("memory.max_usage_in_bytes", "0"),
        ("tasks", "0"),
        ("tasks", "0"),
        ("cpu.cfs_period_us", "100000"),
        ("cpu.cfs_quota_us", "100000"),
        ("tasks", "0"),
    ]
    groups.close()


def vacant(tmp_path: Path, used: int, processes: str) -> tuple[Cgroups, bool]:
    """Groups of version 1 of a sandbox `one`, and whether they are as good as new."""
    tree_v1(tmp_path)
    groups = Cgroups(cgroup.find(str(tmp_path), OWN_V1, "mine"))
    for controllers in ("memory", "pids", "cpu,cpuacct"):
        (tmp_path / controllers / "own/mine/one").mkdir()
    memory = tmp_path / "memory/own/mine/one"
    (memory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (memory / "cgroup.procs").write_text(processes)
    return groups, groups.are_vacant("one")


@pytest.mark.parametrize(
    ("used", "processes", "fit"),
    [(0, "", True), (512 << 10, "", True), (1 << 20, "", False), (0, "7\n", False)],
)
def test_a_group_that_still_counts_something_is_not_left(
    tmp_path: Path, used: int, processes: str, *, fit: bool
) -> None:
    groups, found = vacant(tmp_path, used, processes)
    assert found is fit
    groups.leave("one", PLACE)
    left = sorted(path.name for path in tmp_path.glob("*/own/mine/*"))
    assert left == [f"_vacant.{PLACE}"] * 3
    groups.close()


def test_groups_of_version_2_go(tmp_path: Path) -> None:
    """None can be renamed."""
    own = tree_v2(tmp_path, available="memory pids", enabled="memory pids")
    group(own / "mine", "memory pids")
    groups = Cgroups(cgroup.find(str(tmp_path), "0::/service\n", "mine"))
    (own / "mine/one").mkdir()
    assert groups.are_vacant("one")
    groups.leave("one", PLACE)
    assert [path.name for path in (own / "mine").iterdir()] == ["cgroup.subtree_control"]
    assert groups.enter("two", LIMITS, PLACE) == groups.enter("two", LIMITS)
    groups.close()


def box(state: Path, name: str) -> Path:
    """What a sandbox that wrote nothing leaves."""
    work = state / "sandboxes" / name / "work/work" / VOLATILE
    work.mkdir(parents=True)
    (work / "dirty").write_text("")
    (state / "sandboxes" / name / "upper/workspace").mkdir(parents=True)
    (state / "sandboxes" / name / "guest.sock").write_text("")
    return state / "sandboxes" / name


def test_nothing_of_a_sandbox_is_in_the_place_that_it_left(tmp_path: Path) -> None:
    (tmp_path / "sandboxes/vacant.00000003/work").mkdir(parents=True)
    for name in ("empty", "died", "full", "parts"):
        box(tmp_path, name)
    (tmp_path / "sandboxes/died/error").write_text("of its last step")
    (tmp_path / "sandboxes/memory").mkdir()
    (tmp_path / "sandboxes/memory/guest.sock").write_text("")
    (tmp_path / "sandboxes/full/upper/workspace/file").write_text("")
    orders = [
        b"empty 00000001 leave",
        b"died 00000002 leave",
        b"full 00000004 leave",
        b"parts 00000003",
        b"memory 00000005 leave",
        b"none 00000006 leave",
    ]
    answers = swept(tmp_path / "sandboxes", Cgroups([]), orders)
    assert answers == [
        *(b"empty left\n", b"died left\n", b"full left\n"),
        *(b"parts\n", b"memory\n", b"none\n"),
    ]
    sandboxes = tmp_path / "sandboxes"
    found = sorted(str(path.relative_to(sandboxes)) for path in sandboxes.rglob("*"))
    assert found == [f"vacant.0000000{n}{rest}" for n in (1, 2, 4) for rest in ("", "/work")]


def test_a_place_whose_groups_cannot_be_left_is_removed(tmp_path: Path) -> None:
    """Where one hierarchy lets its groups be renamed and the next one does not."""
    groups, _ = vacant(tmp_path, 0, "")
    (tmp_path / "pids/own/mine/one").rmdir()
    for file in ("memory.usage_in_bytes", "cgroup.procs"):
        os.truncate(tmp_path / "memory/own/mine/one" / file, 0)
    (tmp_path / "memory/own/mine/one/memory.usage_in_bytes").write_text("0")
    box(tmp_path, "one")
    (answer,) = swept(tmp_path / "sandboxes", groups, [b"one 00000001 leave"])
    # A plain directory with files in it cannot be removed as a group's is; that was renamed, and is tried.
    assert answer.startswith(b"one Directory not empty: _vacant.00000001")
    assert not (tmp_path / "cpu,cpuacct/own/mine/one").exists()
    groups.close()


def places(state: Path) -> list[str]:
    return [path.name for path in (state / "sandboxes").glob("vacant.*")]


async def left_by(backend: NamespaceBackend, state: Path, template: Template, script: str) -> list[str]:
    """Has sandboxes run the script and end, until one has left its place."""
    number = 0
    async with asyncio.timeout(40):
        while not (found := places(state)):
            number += 1
            connection = await backend.create(f"first-{number}", template)
            assert (await shell(connection, script)).exited.exit_code == 0
            await connection.close()
            await backend.destroy(f"first-{number}")
    return found


@pytest.mark.anyio
async def test_the_next_sandbox_finds_its_own_limits_and_no_trace(
    backend: NamespaceBackend, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    large = replace(Template("t"), limits=Limits(memory_bytes=256 << 20, pids=30, cpu_count=2.0))
    await left_by(backend, state, large, "head -c 100M /dev/zero | tail -c 100M >/dev/null; echo 1 >f")
    small = replace(Template("t"), limits=Limits(memory_bytes=64 << 20, pids=20))
    connection = await backend.create("second", small)
    assert places(state) == [], "it took the place over"
    seen = await shell(connection, "ls -A / /workspace; cat /proc/self/cgroup | cut -d: -f3 | sort -u")
    assert seen.stdout.partition(b"/workspace:\n")[2].split() == [b"/"]
    if "memory" in backend.capabilities().enforced_limits:
        hog = Command(argv=(b"python3", b"-c", b"x = b'x' * (200 << 20)"))
        exited = (await execute(connection, hog)).exited
        assert exited.reason is ExitReason.OOM_KILLED
        said = re.fullmatch(r"memory limit (\d+) bytes, peak (\d+) bytes", exited.detail)
        assert said is not None, exited.detail
        assert int(said[1]) == 64 << 20 >= int(said[2]), "the peak is its own"
    bomb = await shell(connection, "for n in $(seq 40); do sleep 60 & done", timeout=30)
    assert b"fork" in bomb.stderr.lower()
    await connection.close()
    await backend.destroy("second")


@pytest.mark.anyio
async def test_a_place_that_was_taken_away_fails_one_start(backend: NamespaceBackend, tmp_path: Path) -> None:
    state = tmp_path / "state"
    (place,) = await left_by(backend, state, Template("t"), "true")
    (state / "sandboxes" / place / "work").rmdir()
    (state / "sandboxes" / place).rmdir()
    with pytest.raises(StartFailed, match=rf"No such file or directory: rename {place} second"):
        await backend.create("second", Template("t"))
    connection = await backend.create("third", Template("t"))
    assert (await shell(connection, "true")).exited.exit_code == 0
    await connection.close()
