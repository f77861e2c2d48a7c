"""What the page's stream of events says: everything once, then what is new, at the reader's pace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sandboxd import web
from sandboxd.clock import ManualClock
from sandboxd.config import Config
from sandboxd.daemon import running
from sandboxd.pools import Pools
from sandboxd.run_digest import KEYS
from sandboxd.runs import Run
from sandboxd.types import Command, Exited, ExitReason, PoolStats, Stderr, Stdout
from sandboxd.v1 import sandbox_service_pb2 as pb
from sandboxd.web.board import Board, Reader
from sandboxd.web.history import POINTS_KEPT, History
from sandboxd.web.server import STUCK_SECONDS, served
from sandboxd.web.transcripts import COMMANDS_KEPT, SANDBOXES_KEPT, TAIL_BYTES, Transcripts, ending

from .conftest import settle
from .page_kit import State, stream
from .test_web_guard import page, settings, told

pytestmark = pytest.mark.anyio
# Each is some 30 KB to a page: more in all than a connection's buffers hold (4 MB by Linux's defaults).
STEPS = 200


async def test_leases_failures_and_counts_as_they_change(tmp_path: Path) -> None:
    config = settings(tmp_path, token=False, faults=["fail start 1.0"])
    async with asyncio.timeout(30), page(config) as (session, client), stream(session) as states:
        async for state in states:
            if state.rows.get("failures"):
                break
        assert state.begin["actions"] is False
        failure = next(iter(state.rows["failures"].values()))
        assert (failure["phase"], failure["cause"]) == ("start", "INFRASTRUCTURE")
        assert "a fault was asked for" in failure["message"]
        assert await client.list_failures() != []


async def test_a_lease_from_its_grant_to_its_end(tmp_path: Path) -> None:
    config = settings(tmp_path, token=False)
    async with asyncio.timeout(30), page(config) as (session, client), stream(session) as states:
        box = await client.acquire("python", timeout=20, labels={"episode": "e-1"}, tenant="red")
        name = box.name.removeprefix("sandboxes/")
        async for state in states:
            if state.rows["leases"]:
                break
        lease = state.rows["leases"][name]
        assert (lease["labels"], lease["tenant"], lease["exact"]) == ({"episode": "e-1"}, "red", True)
        assert state.rows["tenants"]["python/red"]["active"] == 1
        done = await box.exec(["sh", "-c", "echo seen; echo bad >&2; exit 3"])
        assert done.exit_code == 3
        status, words = await told(session, "GET", f"/sandboxes/{name}")
        (command,) = json.loads(words)["commands"]
        assert (status, command["stdout"], command["stderr"]) == (200, "seen\n", "bad\n")
        assert (command["running"], command["ended"].partition(" after ")[0]) == (False, "exit code 3")
        assert command["argv"].startswith("sh -c ")
        await box.release()
        async for state in states:
            if not state.rows["leases"] and not state.rows["tenants"]:
                break
        assert state.rows["pools"]["python"]["released_total"] == 1


async def test_named_commands_are_asked_for_their_output(tmp_path: Path) -> None:
    async with asyncio.timeout(30), page(settings(tmp_path, token=False)) as (session, client):
        box = await client.acquire("python", timeout=20)
        argv = [b"sh", b"-c", b"echo mine; exec sleep 60"]
        call = box._stub.ExecCommand(
            pb.ExecCommandRequest(name=box.name, argv=argv, command_id="job", detached=True)
        )
        while not (await call.read()).HasField("stdout"):
            pass
        call.cancel()
        name = box.name.removeprefix("sandboxes/")
        (command,) = json.loads((await told(session, "GET", f"/sandboxes/{name}"))[1])["commands"]
        assert (command["id"], command["running"], command["stdout"]) == ("job", True, "mine\n")


def write_steps(directory: Path) -> Path:
    """A run of so many families that no connection's buffers hold what a page is told first."""
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w") as file:
        for step in range(1, STEPS + 1):
            file.write(
                json.dumps({"step": step} | {f"solve_rate/{n}": step / 997 for n in range(1000)}) + "\n"
            )
    return directory / "metrics.jsonl"


async def silent_page(config: Config) -> socket.socket:
    """A page that has been sent the beginning of its first message, and then reads no more."""
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(silent, ("127.0.0.1", int(str(config.web).rpartition(":")[2])))
    await loop.sock_sendall(silent, b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    begun = b""
    while b"data: " not in begun:
        begun += await loop.sock_recv(silent, 100)
    return silent


async def rest(silent: socket.socket, end: bytes) -> bytes:
    """What it was sent since, up to some bytes, or to the end of its connection."""
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    loop, found = asyncio.get_running_loop(), bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := await loop.sock_recv(silent, 1 << 20):
            found += piece
            if end in found[-len(end) - len(piece) :]:
                break
    return bytes(found)


async def test_who_does_not_read_is_told_the_newest(tmp_path: Path) -> None:
    """A page that reads nothing holds up nobody, and hears of the present alone when it reads again."""
    file = write_steps(tmp_path / "run")
    config = settings(tmp_path, token=False, web_runs=[file.parent])
    async with asyncio.timeout(60), page(config) as (session, _), stream(session) as states:
        async for state in states:
            if f"run/{STEPS}" in state.rows["steps"]:
                break
        with contextlib.closing(await silent_page(config)) as silent:
            for step in range(STEPS + 1, STEPS + 4):
                with file.open("a") as more:
                    more.write(json.dumps({"step": step, "solve_rate/all": 0.5}) + "\n")
                async for state in states:
                    if f"run/{step}" in state.rows["steps"]:
                        break
            told = (await rest(silent, f'"run/{STEPS + 3}"'.encode())).decode()
    messages = [message for message in told.split("data: ") if '"steps"' in message]
    # The first, which it had begun to read, and one with all that came meanwhile.
    assert [message.count('"run":"run","step"') for message in messages] == [STEPS, 3]


async def test_who_reads_nothing_for_long_is_cut_off(tmp_path: Path) -> None:
    file, clock = write_steps(tmp_path / "run"), ManualClock()
    config = settings(tmp_path, token=False, web_runs=[file.parent])
    seen: dict[str, Any] = {}

    async def read(states: AsyncIterator[State]) -> None:
        async for state in states:
            seen.update(state.rows["steps"])

    async def until_seen(step: str) -> None:
        async with asyncio.timeout(20):
            while step not in seen:
                clock.advance(0.25)
                await asyncio.sleep(0.01)

    async with (
        asyncio.timeout(60),
        served(config, Pools(clock)),
        aiohttp.ClientSession(f"http://{config.web}") as session,
        stream(session) as states,
        asyncio.TaskGroup() as tasks,
    ):
        reading = tasks.create_task(read(states))
        await until_seen(f"run/{STEPS}")
        with contextlib.closing(await silent_page(config)) as silent:
            clock.advance(STUCK_SECONDS)
            await settle()
            # Without what it was to hear: the end of its connection.
            last = f'"run/{STEPS}"'.encode()
            assert last not in await rest(silent, last)
        with file.open("a") as more:
            more.write(json.dumps({"step": STEPS + 1, "solve_rate/all": 0.5}) + "\n")
        await until_seen(f"run/{STEPS + 1}")
        reading.cancel()


async def test_the_daemons_end_ends_the_stream(tmp_path: Path) -> None:
    config = settings(tmp_path, token=False)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        begun, end = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with running(config):
                begun.set()
                await end.wait()

        serving = tasks.create_task(serve())
        await begun.wait()
        async with aiohttp.ClientSession(f"http://{config.web}") as session, stream(session) as states:
            await anext(states)
            end.set()
            async for _ in states:
                pass
        await serving


def stats(**counts: int) -> PoolStats:
    every = {name: 0 for name in PoolStats.__dataclass_fields__ if name.endswith(("total", "limit"))}
    every |= dict.fromkeys(("warm_target", "starting", "warm", "active", "waiting", "deleting"), 0)
    return PoolStats(**{**every, "start_seconds": None, **counts})  # type: ignore[arg-type]


def test_history_is_bounded_and_forgets_pools_that_are_gone() -> None:
    history = History()
    for second in range(POINTS_KEPT + 10):
        history.add(float(second), {"a": stats(warm=second), "b": stats()})
    history.add(2000.0, {"a": stats(start_failures_total=1, lost_total=2, unhealthy_total=3)})
    told = history.since(0)
    assert list(told) == ["a"]
    assert len(told["a"]) == POINTS_KEPT
    assert told["a"][-1] == [2000.0, 0, 0, 0, 0, 6, None, None]
    assert history.since(2000.0) == {}
    assert [each[0] for each in history.since(908.5)["a"]] == [909.0, 2000.0]


def test_a_reader_is_told_what_is_new_alone() -> None:
    pools = Pools(ManualClock())
    board = Board(pools)
    first, second = Reader(board), Reader(board)
    begun = json.loads(first.news())
    assert begun["begin"]["boot"] == board.boot
    assert json.loads(first.news()) == {"now": begun["now"], "draining": False, "leased": 0}
    assert "begin" in json.loads(second.news())


async def test_a_run_that_grows_is_cut_back_and_goes_on(tmp_path: Path) -> None:
    run, file = Run(tmp_path), tmp_path / "metrics.jsonl"
    assert await run.look()
    nothing: dict[str, object] = {
        "fault": "metrics.jsonl is not there yet",
        "step": None,
        "latest": {},
        "families": {},
    }
    assert run.head() == nothing
    assert not await run.look()

    def row(step: int, rate: float, **more: object) -> str:
        return json.dumps({"step": step, "solve_rate/all": rate, **more}) + "\n"

    def rates() -> list[tuple[float, float]]:
        return [(row["step"], row["solve_rate/all"]) for row in run.steps.values()]

    file.write_text(row(1, 0.1) + row(2, 0.2)[:-9])
    assert await run.look()
    assert rates() == [(1, 0.1)]
    file.write_text(row(1, 0.1) + row(2, 0.2) + row(3, 0.3))
    assert await run.look()
    assert rates() == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert not await run.look()
    # Resumed after step 1, and longer than before by the time somebody looks.
    file.write_text(row(1, 0.1) + row(2, 0.7, note="x" * 500) + row(3, 0.8) + row(4, 0.9))
    assert await run.look()
    assert rates() == [(1, 0.1), (2, 0.7), (3, 0.8), (4, 0.9)]
    file.write_text(row(1, 0.5))
    assert await run.look()
    assert rates() == [(1, 0.5)]
    with file.open("a") as more:
        more.write('{"step": 2, "solve_rate/all": NaN}\n[1]\nnot JSON\n{"step": "x"}\n{"step": true}\n\xff\n')
        more.write(
            row(3, 0.6, **{"off_policy/mean": math.inf, "buffer/ready": 4, "other": 1, "solve_rate/a": "x"})
        )
    assert await run.look()
    assert list(run.steps.values())[1:] == [
        {"run": tmp_path.name, "step": 2},
        {"run": tmp_path.name, "step": 3, "solve_rate/all": 0.6, "buffer/ready": 4},
    ]
    file.unlink()
    assert await run.look()
    assert run.head()["fault"] == "metrics.jsonl is not there yet"
    file.mkdir()
    assert await run.look()
    assert run.head()["fault"] == "metrics.jsonl cannot be read: Is a directory"


def test_transcripts_are_bounded() -> None:
    transcripts = Transcripts(ManualClock())
    for number in range(COMMANDS_KEPT + 2):
        one = transcripts.begin("a", Command((b"cmd", b"%d" % number)))
    for place in range(10):
        one.hear(Stdout(b"x" * TAIL_BYTES, place * TAIL_BYTES))
    one.hear(Stderr(b"\xff", 0))
    one.hear(Exited(ExitReason.SIGNALED, signal=9, wall=1.0))
    one.leave()
    rows = transcripts.of("a")
    assert [row["argv"] for row in rows] == [f"cmd {number}" for number in range(2, COMMANDS_KEPT + 2)]
    assert (len(rows[-1]["stdout"]), rows[-1]["stdout_bytes"]) == (TAIL_BYTES, 10 * TAIL_BYTES)
    assert (rows[-1]["stderr"], rows[-1]["ended"]) == ("\ufffd", "signaled by signal 9 after 1.00 s")
    for number in range(SANDBOXES_KEPT):
        transcripts.begin(f"b{number}", Command((b"cmd",)))
    assert transcripts.of("a") == []
    assert ending(Exited(ExitReason.TIMED_OUT, wall=2.0)) == "timed out after 2.00 s"


def test_scripts_name_no_metric() -> None:
    """The daemon tells which metrics are drawn: one list, which a test holds against what runs write."""
    kinds = {key.partition("/")[0] for key in KEYS}
    scripts = list(Path(web.__file__).parent.glob("*.js"))
    assert scripts
    for script in scripts:
        found = re.findall(rf"[\"'`]((?:{'|'.join(kinds)})/\w+)", script.read_text())
        assert (script.name, found) == (script.name, [])
