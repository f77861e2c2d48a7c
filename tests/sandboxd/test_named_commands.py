"""What every backend owes who names its commands: they outlive their call, and are read by id and offset."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandboxd.backends.base import Connection
from sandboxd.errors import CommandExists, CommandNotFound, SandboxLost
from sandboxd.guest.replay import LIMIT_BYTES
from sandboxd.types import Command, CommandInfo, Event, Exited, ExitReason, Kept, Started, Stderr, Stdout

from .backend_kit import Case, execute, pieces, processes_with

pytestmark = pytest.mark.anyio
# Prints nothing before the file is there.
GATE = "while [ ! -e go ]; do sleep 0.01; done; "
# Longer than what is kept; each place in it is told from any other.
LONG = "seq 1 1000000"


@pytest.fixture
async def box(case: Case) -> AsyncIterator[Connection]:
    if case.by_engine:
        pytest.skip("by the Engine alone there are no named commands")
    async with case.sandbox() as connection:
        yield connection


def long_output() -> bytes:
    return b"".join(b"%d\n" % n for n in range(1, 1_000_001))


def command(script: str, command_id: str = "it", **options: object) -> Command:
    return Command((b"sh", b"-c", script.encode()), id=command_id, **{"detached": True, **options})  # type: ignore[arg-type]


async def start(box: Connection, script: str, command_id: str = "it", **options: object) -> None:
    """Starts a detached command and leaves the call as soon as that runs."""
    async with box.exec(command(script, command_id, **options)) as events:
        assert isinstance(await anext(aiter(events)), Started)


@dataclass
class Heard:
    """What a reader heard: the pieces of each stream with their offsets, and the exit."""

    pieces: dict[type[Event], list[tuple[int, bytes]]] = field(
        default_factory=lambda: {Stdout: [], Stderr: []}
    )
    exited: Exited | None = None

    def add(self, event: Event) -> None:
        assert self.exited is None, "the exit is the last"
        if isinstance(event, Stdout | Stderr):
            assert event.data
            self.pieces[type(event)].append((event.offset, event.data))
        elif isinstance(event, Exited):
            self.exited = event

    @property
    def first(self) -> int:
        return self.pieces[Stdout][0][0]

    @property
    def stdout(self) -> bytes:
        return b"".join(data for _, data in self.pieces[Stdout])

    @property
    def stderr(self) -> bytes:
        return b"".join(data for _, data in self.pieces[Stderr])

    @property
    def holes(self) -> list[int]:
        """Between the pieces of standard output."""
        pairs = itertools.pairwise(self.pieces[Stdout])
        return [hole for (a, data), (b, _) in pairs if (hole := b - a - len(data))]

    @property
    def code(self) -> int:
        assert self.exited is not None
        assert self.exited.reason is ExitReason.EXITED, self.exited
        return self.exited.exit_code


async def attached(box: Connection, command_id: str = "it", **offsets: int) -> Heard:
    """All that the command tells one reader."""
    heard = Heard()
    async with asyncio.timeout(30), box.commands.attach(command_id, **offsets) as events:
        async for event in events:
            heard.add(event)
    assert heard.exited is not None
    return heard


async def go(box: Connection) -> None:
    await box.files.write(b"go", pieces(b""), 0o644)


async def test_a_detached_command_outlives_its_call(box: Connection) -> None:
    await start(box, GATE + "echo out; echo err >&2; exit 3")
    assert await box.commands.known() == [CommandInfo("it", True, Kept(0, 0), Kept(0, 0))]
    await go(box)
    heard = await attached(box)
    assert (heard.stdout, heard.stderr, heard.code) == (b"out\n", b"err\n", 3)
    assert await box.commands.known() == [CommandInfo("it", False, Kept(0, 4), Kept(0, 4))]
    assert (await attached(box)).code == 3


async def test_without_detachment_a_named_command_ends_with_its_call(box: Connection) -> None:
    async with box.exec(command("echo begun; sleep 1000", detached=False)) as events:
        reader = asyncio.create_task(attached(box))
        async for event in events:
            if isinstance(event, Stdout):
                break
    heard = await reader
    assert heard.exited is not None
    assert (heard.stdout, heard.exited.reason) == (b"begun\n", ExitReason.SIGNALED)


async def test_the_starting_call_hears_what_any_reader_does(box: Connection) -> None:
    heard = Heard()
    async with box.exec(command("echo out; echo err >&2; exit 4", detached=False)) as events:
        async for event in events:
            heard.add(event)
    assert (heard.stdout, heard.stderr, heard.code) == (b"out\n", b"err\n", 4)
    again = await attached(box)
    assert (again.stdout, again.exited) == (b"out\n", heard.exited)


async def test_output_is_the_same_from_any_place(box: Connection) -> None:
    whole = b"".join(b"%d\n" % n for n in range(1, 100_001))
    await start(box, GATE + "echo first; seq 1 100000; seq 1 9 >&2; sleep 0.1; echo last")
    live = asyncio.create_task(attached(box, stdout_offset=7))
    await go(box)
    heard = await live
    whole = b"first\n" + whole + b"last\n"
    assert (heard.first, heard.stdout) == (7, whole[7:])
    for place in (0, 1, 123_456, len(whole) - 1):
        again = await attached(box, stdout_offset=place, stderr_offset=4)
        assert (again.first, again.stdout, again.holes) == (place, whole[place:], [])
        assert again.stderr == b"3\n4\n5\n6\n7\n8\n9\n"
    past = await attached(box, stdout_offset=len(whole) + 5, stderr_offset=1 << 62)
    assert (past.stdout, past.stderr, past.code) == (b"", b"", 0)


async def test_readers_do_not_disturb_one_another(box: Connection) -> None:
    await start(box, GATE + "seq 1 50000; exit 6")
    async with asyncio.TaskGroup() as tasks:
        readers = [tasks.create_task(attached(box)) for _ in range(5)]
        async with box.commands.attach("it") as events:
            assert isinstance(await anext(aiter(events)), Started)
        await go(box)
    whole = b"".join(b"%d\n" % n for n in range(1, 50_001))
    assert all((reader.result().stdout, reader.result().code) == (whole, 6) for reader in readers)


async def test_a_reader_that_stalls_holds_up_nobody_and_is_told_what_it_missed(box: Connection) -> None:
    whole = long_output()
    await start(box, GATE + LONG)
    stalled = Heard()
    async with box.commands.attach("it") as events:
        assert isinstance(await anext(aiter(events)), Started)
        await go(box)
        other = await attached(box)
        assert other.code == 0
        assert await box.commands.known() == [
            CommandInfo("it", False, Kept(len(whole) - LIMIT_BYTES, len(whole)), Kept(0, 0))
        ]
        async with asyncio.timeout(30):
            async for event in events:
                stalled.add(event)
    for heard in (other, stalled):
        for offset, data in heard.pieces[Stdout]:
            assert data == whole[offset : offset + len(data)]
        missing = heard.first + sum(heard.holes)
        assert missing + len(heard.stdout) == len(whole)
    assert stalled.first + sum(stalled.holes) > 0
    assert len(stalled.stdout) >= LIMIT_BYTES


async def test_what_no_longer_fits_is_told_by_the_offset(box: Connection) -> None:
    whole = long_output()
    await start(box, LONG)
    await attached(box)
    for place in (0, 1000, len(whole) - LIMIT_BYTES):
        heard = await attached(box, stdout_offset=place)
        assert (heard.first, heard.holes) == (len(whole) - LIMIT_BYTES, [])
        assert heard.stdout == whole[-LIMIT_BYTES:]


async def test_a_limit_with_a_tail_leaves_its_hole(box: Connection) -> None:
    whole = b"".join(b"%d\n" % n for n in range(1, 10_001))
    await start(box, "seq 1 10000", output_limit=1000, output_tail=500)
    await attached(box)
    heard = await attached(box)
    assert (heard.first, heard.holes) == (0, [len(whole) - 1500])
    assert heard.stdout == whole[:1000] + whole[-500:]
    await start(box, "yes", "much", output_limit=1000)
    much = await attached(box, "much")
    assert much.exited is not None
    assert (much.exited.reason, much.stdout) == (ExitReason.OUTPUT_LIMIT_EXCEEDED, b"y\n" * 500)


async def test_standard_input_comes_whole_with_the_start(box: Connection) -> None:
    data = b"".join(b"%d\n" % n for n in range(150_000))
    await start(box, GATE + "cat", stdin=data)
    await go(box)
    assert (await attached(box)).stdout == data
    await start(box, "cat; echo end", "empty")
    assert (await attached(box, "empty")).stdout == b"end\n"


async def test_a_timeout_holds_when_nobody_listens(box: Connection) -> None:
    marker = f"7{uuid.uuid4().int % 10**12:012d}"
    await start(box, f"setsid sleep {marker} & sleep {marker}", timeout=0.3)
    heard = await attached(box)
    assert heard.exited is not None
    assert heard.exited.reason is ExitReason.TIMED_OUT
    assert await processes_with(box, marker) == []


async def test_a_signal_by_name(box: Connection) -> None:
    await start(box, "trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.01; done")
    async with box.commands.attach("it") as events:
        async for event in events:
            if isinstance(event, Stdout):
                break
    await box.commands.signal("it", 10)
    heard = await attached(box)
    assert (heard.stdout, heard.code) == (b"ready\ncaught\n", 5)
    await box.commands.signal("it", 10)
    await start(box, "sleep 1000", "other")
    await box.commands.signal("other", 15)
    other = await attached(box, "other")
    assert other.exited is not None
    assert (other.exited.reason, other.exited.signal) == (ExitReason.SIGNALED, 15)


async def test_an_id_is_one_commands(box: Connection) -> None:
    await start(box, "exit 1")
    await attached(box)
    for _ in range(2):
        with pytest.raises(CommandExists, match="'it' exists"):
            await start(box, "exit 2")
    assert (await attached(box)).code == 1
    await box.commands.forget("it")
    assert await box.commands.known() == []
    await start(box, "exit 3")
    assert (await attached(box)).code == 3


async def test_an_id_that_is_nobodys(box: Connection) -> None:
    with pytest.raises(CommandNotFound, match="'none'"):
        await attached(box, "none")
    with pytest.raises(CommandNotFound, match="'none'"):
        await box.commands.signal("none", 9)
    with pytest.raises(CommandNotFound, match="'none'"):
        await box.commands.forget("none")
    assert await box.commands.known() == []


async def test_what_could_not_be_started_is_kept_as_well(box: Connection) -> None:
    outcome = await execute(box, Command((b"no-such-program",), id="it", detached=True))
    assert outcome.exited.reason is ExitReason.NOT_STARTED
    assert (await attached(box)).exited == outcome.exited
    assert await box.commands.known() == [CommandInfo("it", False, Kept(0, 0), Kept(0, 0))]


async def test_what_is_forgotten_ends(box: Connection) -> None:
    marker = f"6{uuid.uuid4().int % 10**12:012d}"
    await start(box, f"setsid sleep {marker} & echo begun; sleep {marker}")
    heard = Heard()
    async with asyncio.timeout(20), box.commands.attach("it") as events:
        async for event in events:
            heard.add(event)
            if isinstance(event, Stdout):
                await box.commands.forget("it")
    assert heard.exited is not None
    assert heard.exited.reason is ExitReason.SIGNALED
    async with asyncio.timeout(20):
        while await processes_with(box, marker):
            continue  # Each look is a command of its own.
    with pytest.raises(CommandNotFound):
        await attached(box)


async def test_of_ended_commands_the_last_are_kept(box: Connection) -> None:
    await start(box, "sleep 1000", "runs")
    for n in range(66):
        await start(box, f"echo {n}", f"c{n}")
        await attached(box, f"c{n}")
    known = {info.id: info.running for info in await box.commands.known()}
    assert known == {"runs": True} | {f"c{n}": False for n in range(2, 66)}
    assert (await attached(box, "c2")).stdout == b"2\n"


async def test_a_terminal_needs_no_listener(case: Case, box: Connection) -> None:
    if case.without_terminals:
        return
    await start(box, "stty -echo; read x; echo got:$x; cat; echo end", terminal=(24, 80), stdin=b"word\n")
    assert b"got:word\r\nend\r\n" in (await attached(box)).stdout


async def test_a_detached_command_dies_with_its_sandbox(case: Case) -> None:
    if case.by_engine:
        return
    marker = f"5{uuid.uuid4().int % 10**12:012d}"

    def processes() -> list[Path]:
        """On this host, which sees those of every sandbox."""
        lines = [(path, _read(path)) for path in Path("/proc").glob("[0-9]*/cmdline")]
        return [path for path, line in lines if marker.encode() in line]

    async with case.sandbox() as box:
        await start(box, f"setsid sleep {marker} & sleep {marker}")
        reading = asyncio.create_task(attached(box))
        async with asyncio.timeout(20):
            while len(processes()) < 2:
                await asyncio.sleep(0.01)
    assert processes() == []
    with pytest.raises(SandboxLost):
        await reading
    with pytest.raises(SandboxLost):
        await box.commands.known()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
