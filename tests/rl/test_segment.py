"""Weights in shared memory: whole versions or none, whoever dies while he writes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl.fakes import FakeTrainer
from rl.generator import UpdateFailed
from rl.generators.checks import check_weights, segment_shapes
from rl.generators.fake import ByteTokenizer, FakeGenerator, sums_reply
from rl.segment import NotInSegment, Segment, create_segment, open_segment, places_of
from rl.weights import Publisher, open_segment_file

PLACES = places_of([("a", "float32", (2, 3)), ("b", "bfloat16", (4,))])


@pytest.fixture
def file() -> Iterator[Path]:
    with open_segment_file(Path("/nowhere")) as path:
        yield path


@pytest.fixture
def segment(file: Path) -> Iterator[Segment]:
    created = create_segment(file, PLACES)
    yield created
    created.close()


def write(segment: Segment, version: int) -> None:
    with segment.writing(version) as slot:
        segment.map[slot.start : slot.start + PLACES[-1].end] = bytes([version]) * PLACES[-1].end


def read(path: Path, version: int) -> bytes:
    segment = open_segment(path)
    try:
        slot = segment.find(version)
        content = segment.map[slot.start : slot.start + PLACES[-1].end]
        segment.check(slot)
        return content
    finally:
        segment.close()


def test_tensors_lie_behind_one_another() -> None:
    assert [(place.offset, place.end) for place in PLACES] == [(0, 24), (24, 32)]


def test_the_two_newest_versions_can_be_read(segment: Segment, file: Path) -> None:
    with pytest.raises(NotInSegment, match="weights 1 are not in the segment, which holds none"):
        read(file, 1)
    for version in (1, 2, 3):
        write(segment, version)
        assert read(file, version) == bytes([version]) * 32
    assert read(file, 2) == bytes([2]) * 32
    with pytest.raises(NotInSegment, match=r"weights 1 are not in the segment, which holds \[2, 3\]"):
        read(file, 1)


def test_a_write_that_breaks_off_is_never_read_and_costs_the_older_version_only(
    segment: Segment, file: Path
) -> None:
    for version in (1, 2):
        write(segment, version)
    with pytest.raises(ZeroDivisionError), segment.writing(3):
        assert open_segment(file).versions == [2]
        raise ZeroDivisionError
    assert open_segment(file).versions == [2]
    write(segment, 4)
    write(segment, 5)
    assert read(file, 4) == bytes([4]) * 32
    assert read(file, 5) == bytes([5]) * 32


def test_a_reader_that_was_overtaken_finds_out(segment: Segment, file: Path) -> None:
    write(segment, 1)
    reader = open_segment(file)
    slot = reader.find(1)
    write(segment, 2)
    reader.check(slot)
    with segment.writing(3), pytest.raises(NotInSegment, match="overwritten while they were read"):
        reader.check(slot)
    with pytest.raises(NotInSegment, match="overwritten"):
        reader.check(slot)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 8192])
def test_what_is_no_segment_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(NotInSegment, match="cannot be mapped"):
        open_segment(path)
    path.write_bytes(content)
    with pytest.raises(NotInSegment, match=r"is not a segment|cannot be mapped"):
        open_segment(path)
    with pytest.raises(UpdateFailed, match="weights 1 did not load"):
        segment_shapes(path, 1)


def test_weights_of_another_model_are_refused_before_the_engine_hears_of_them(
    segment: Segment, file: Path, tmp_path: Path
) -> None:
    write(segment, 1)
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(5, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(UpdateFailed, match=r"b is not as in"):
        check_weights(file, tmp_path, 1)
    with pytest.raises(UpdateFailed, match="weights 2 did not load"):
        check_weights(file, tmp_path, 2)


KILLED = """
import os, signal, sys
from pathlib import Path
from rl.segment import create_segment, places_of
segment = create_segment(Path(sys.argv[1]), places_of([("a", "float32", (2, 3)), ("b", "bfloat16", (4,))]))
with segment.writing(1):
    pass
with segment.writing(2) as slot:
    segment.map[slot.start] = 7
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_writer_killed_in_the_middle_leaves_the_version_before(file: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(file)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert open_segment(file).versions == [1]
    with pytest.raises(NotInSegment):
        read(file, 2)


OWNER = """
import sys, time
from pathlib import Path
from rl.weights import open_segment_file
with open_segment_file(Path("/nowhere")) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def test_nothing_is_left_of_a_segment_whose_owner_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        mapped = create_segment(path, PLACES)
        write(mapped, 1)
        owner.kill()
    # Whoever has it mapped keeps it, and the memory goes with the last of them: it has no name to be left.
    assert mapped.versions == [1]
    assert not path.exists()


def test_a_publisher_with_a_segment_writes_no_file(file: Path, tmp_path: Path) -> None:
    async def body() -> None:
        generator = FakeGenerator(ByteTokenizer(), sums_reply(lambda version: 1.0), failing_updates=[2])
        publisher = Publisher(FakeTrainer(), generator, tmp_path, tmp_path, file)
        await publisher.publish(1)
        assert open_segment(file).versions == [1]
        with pytest.raises(UpdateFailed):
            await publisher.publish(2)
        assert publisher.version == 1
        await publisher.publish(3)
        assert publisher.version == 3
        assert open_segment(file).versions == [2, 3]

    asyncio.run(body())
    assert list(tmp_path.iterdir()) == []


def resident(path: Path) -> int:
    """Bytes of the file that this process has mapped for reading and that are there."""
    inode, found, size = str(path.stat().st_ino), False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            found = fields[1] == "r--s" and fields[4] == inode
        elif found and fields[0] == "Rss:":
            size += int(fields[1]) << 10
    return size


def test_a_slots_pages_are_there_before_it_is_read(file: Path) -> None:
    created = create_segment(file, places_of([("a", "float32", (5 << 20,))]))
    with created.writing(1) as slot:
        created.map[slot.start : slot.start + created.slot_bytes] = bytes(created.slot_bytes)
    reader = open_segment(file)
    assert resident(file) < created.slot_bytes
    reader.populate(reader.find(1))
    assert resident(file) >= created.slot_bytes
    reader.close()
    created.close()
