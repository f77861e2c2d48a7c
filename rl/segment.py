"""Memory in which the trainer leaves its weights and from which every generator on the host takes them.

A segment is a file that all of them map, best one without a name (`rl.weights.open_segment`). It holds a
table of the tensors and two slots of their values. A slot is counted up when a writer enters and again when
it has finished: an odd count is a write under way or one that was killed, and such a slot is never read.
Writers take the slots in turn, so the version before stays readable while the next one is written, for a
generator that comes up meanwhile; a reader that was overtaken by two writes finds out by the count.

    magic, bytes of the table, bytes of a slot │ count and version, twice │ table (JSON) │ slot │ slot
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

HEAD = struct.Struct("<16sQQ")
MAGIC = b"sandboxd-weights"
STATE = struct.Struct("<QQ")
STATES_AT = 64
TABLE_AT = 128
SLOTS = 2
PAGE = 4096
POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, for which Python has no name."""
POPULATED_AT_ONCE = 8 << 20
"""Bytes: other threads of this process wait as long as one call takes, a few milliseconds."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class NotInSegment(RuntimeError):
    """A segment does not hold what was looked for, or no longer, or is none."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a slot a tensor lies: `offset` in bytes. Tensors follow one another without a gap."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Slot:
    """One version's values, as bytes. `start` is where in the segment's map they begin, `count` the slot's
    count when it was found."""

    index: int
    start: int
    count: int


def places_of(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[Place, ...]:
    """Lays out tensors, given by name, dtype and shape, one behind the other."""
    places: list[Place] = []
    for name, dtype, shape in tensors:
        places.append(Place(name, dtype, shape, places[-1].end if places else 0))
    return tuple(places)


class Segment:
    """A mapped segment. Its readers map it read-only. Made by `create_segment` and `open_segment`."""

    def __init__(self, file: mmap.mmap, places: tuple[Place, ...], slots_at: int, slot_bytes: int) -> None:
        self.map = file
        self.places = {place.name: place for place in places}
        self._slots_at = slots_at
        self.slot_bytes = slot_bytes

    def close(self) -> None:
        """Unmaps it. Raises BufferError while a tensor still lies in it."""
        self.map.close()

    @property
    def versions(self) -> list[int]:
        """The versions that can be read, oldest first."""
        states = [self._state(index) for index in range(SLOTS)]
        return sorted(version for count, version in states if count and count % 2 == 0)

    def find(self, version: int) -> Slot:
        """The slot that holds `version`. Raises NotInSegment."""
        for index in range(SLOTS):
            count, held = self._state(index)
            if held == version and count and count % 2 == 0:
                return Slot(index, self._start(index), count)
        raise NotInSegment(f"weights {version} are not in the segment, which holds {self.versions or 'none'}")

    def check(self, slot: Slot) -> None:
        """Raises NotInSegment when the slot has been written to since it was found."""
        if self._state(slot.index)[0] != slot.count:
            raise NotInSegment("weights were overwritten while they were read: two newer versions came")

    def populate(self, slot: Slot) -> None:
        """Has the kernel map the slot's pages into this process now, and not one by one as they are read.
        Where it has no such call they come as they are read."""
        end = slot.start + self.slot_bytes
        with suppress(OSError):
            for start in range(slot.start, end, POPULATED_AT_ONCE):
                self.map.madvise(POPULATE_READ, start, min(POPULATED_AT_ONCE, end - start))

    @contextmanager
    def writing(self, version: int) -> Iterator[Slot]:
        """A slot to fill within the block; whoever looks for `version` finds it only once the block has ended
        without an error. One writer at a time."""
        index = min(range(SLOTS), key=self._age)
        count = self._state(index)[0]
        count += 1 + count % 2  # a write that broke off left it odd
        self._set(index, count, version)
        yield Slot(index, self._start(index), count)
        self._set(index, count + 1, version)

    def _age(self, index: int) -> tuple[bool, int]:
        """Slots without a whole version come first, then the older one."""
        count, version = self._state(index)
        return count > 0 and count % 2 == 0, version

    def _start(self, index: int) -> int:
        return self._slots_at + index * self.slot_bytes

    def _state(self, index: int) -> tuple[int, int]:
        count, version = STATE.unpack_from(self.map, STATES_AT + index * STATE.size)
        return count, version

    def _set(self, index: int, count: int, version: int) -> None:
        STATE.pack_into(self.map, STATES_AT + index * STATE.size, count, version)


def create_segment(path: Path, places: tuple[Place, ...]) -> Segment:
    """Makes the file `path`, which exists, a segment for these tensors; maps it for writing."""
    table = json.dumps([asdict(place) for place in places]).encode()
    slots_at, slot_bytes = _pages(TABLE_AT + len(table)), _pages(max(place.end for place in places))
    with path.open("r+b") as file:
        os.truncate(file.fileno(), 0)  # what it held before must not pass for states
        os.truncate(file.fileno(), slots_at + SLOTS * slot_bytes)
        mapped = mmap.mmap(file.fileno(), 0)
    mapped[TABLE_AT : TABLE_AT + len(table)] = table
    HEAD.pack_into(mapped, 0, MAGIC, len(table), slot_bytes)
    return Segment(mapped, places, slots_at, slot_bytes)


def open_segment(path: Path) -> Segment:
    """Maps a segment for reading. Raises NotInSegment when the file is none, or not there."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise NotInSegment(f"{path} cannot be mapped: {error}") from error
    magic, table_bytes, slot_bytes = HEAD.unpack_from(mapped) if len(mapped) > HEAD.size else (b"", 0, 0)
    if magic != MAGIC:
        mapped.close()
        raise NotInSegment(f"{path} is not a segment of weights")
    table = json.loads(mapped[TABLE_AT : TABLE_AT + table_bytes])
    places = tuple(Place(**entry | {"shape": tuple(entry["shape"])}) for entry in table)
    return Segment(mapped, places, _pages(TABLE_AT + table_bytes), slot_bytes)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
