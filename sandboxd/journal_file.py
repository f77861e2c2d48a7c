"""The journal of a daemon as one SQLite file in its state directory, shared by its pools."""

from __future__ import annotations

import dataclasses
import json
import logging
import sqlite3
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from sandboxd import template_record
from sandboxd.clock import Clock, MonotonicClock
from sandboxd.journal import REMEMBERED_ENDINGS, Ending, Entry, Past
from sandboxd.ledger import Totals
from sandboxd.types import Template

logger = logging.getLogger(__name__)

VERSION = 1
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# One that could not be written is tried again after this pause, with the first change that comes then.
AGAIN_SECONDS = 1.0
NOT_WRITTEN = {"origin"}
Statements = list[tuple[str, tuple[object, ...]]]
# A commit writes each page that it changes: sandboxes lie in one tree, without another for their ids. The
# table of an older daemon is used as it is.
SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = OFF;
PRAGMA user_version = {VERSION};
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, pool TEXT NOT NULL, entry TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS endings (id TEXT PRIMARY KEY, pool TEXT NOT NULL, ending TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS totals (pool TEXT PRIMARY KEY, totals TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS templates (
    pool TEXT NOT NULL, digest TEXT NOT NULL, template TEXT NOT NULL, PRIMARY KEY (pool, digest)
);
"""
# Replaced, the row would get another number, and its index another page.
TOTALS = "INSERT INTO totals VALUES (?, ?) ON CONFLICT (pool) DO UPDATE SET totals = excluded.totals"


class JournalFile:
    """The journal of a daemon, in one SQLite file in its state directory.

    What could not be written would tell the next daemon of leases that have changed since: a sandbox that is
    held would be warm. From the first failure on the file is void, until all that the pools know is in it.
    """

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock or MonotonicClock()
        self._boot = _read_boot()
        self._marker = path.with_suffix(".boot")
        self._pools: dict[str, PoolJournal] = {}
        self._again = 0.0
        self.void = False

    @contextmanager
    def open(self) -> Iterator[JournalFile]:
        """Reads it, or starts a new one where it is another boot's, another version's, or damaged.

        Raises OSError.
        """
        if not self._marker.exists() or self._marker.read_text() != self._boot:
            self.remove()
            self._marker.write_text(self._boot)
        with closing(self._connect()) as self._db:
            yield self

    def remove(self) -> None:
        """Takes the files away."""
        self._remove_database()
        self._marker.unlink(missing_ok=True)

    def _remove_database(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _connect(self) -> sqlite3.Connection:
        try:
            return self._opened()
        except sqlite3.DatabaseError as error:
            logger.error("the journal %s cannot be read and is begun anew: %s", self.path, error)
        self._remove_database()
        try:
            return self._opened()
        except sqlite3.Error as error:
            raise OSError(0, str(error), str(self.path)) from error

    def _opened(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, isolation_level=None)
        try:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise sqlite3.DatabaseError(f"it has version {version}, this daemon writes {VERSION}")
            db.executescript(SCHEMA)
            for (name,) in db.execute("SELECT pool FROM totals").fetchall():
                _past(db, name)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            db.close()
            raise sqlite3.DatabaseError(f"it holds what is no entry: {error}") from error
        except BaseException:
            db.close()
            raise
        return db

    def pool(self, name: str) -> PoolJournal:
        """The part of one pool, always the same one. The file must be open."""
        if name not in self._pools:
            self._pools[name] = PoolJournal(self, name)
        return self._pools[name]

    def keep_only(self, pools: set[str]) -> None:
        """Forgets all others: they are not configured any more."""
        known = {name for (name,) in self._db.execute("SELECT pool FROM totals")}
        for table in ("sandboxes", "endings", "totals", "templates"):
            self._write([(f"DELETE FROM {table} WHERE pool = ?", (pool,)) for pool in known - pools])  # noqa: S608

    def past(self, pool: str) -> Past:
        """See `Journal.past`."""
        return _past(self._db, pool)

    def write(self, pool: PoolJournal) -> None:
        """What the pool has noted, or all of every pool while the file is void."""
        if not self.void:
            pools, statements = [pool], pool.changes()
        elif self._clock.now() >= self._again:
            pools = list(self._pools.values())
            statements = [one for each in pools for one in each.everything()]
        else:
            return
        if self._write(statements) and self._validated():
            for each in pools:
                each.written()

    def _write(self, statements: Statements) -> bool:
        """All or nothing; False, said once in the log, when it cannot be written now."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    self._db.execute(statement, values)
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            self._invalidate(error)
            return False
        return True

    def _invalidate(self, error: sqlite3.Error) -> None:
        """Takes no space on the disk, which may be what there is none of."""
        self._again = self._clock.now() + AGAIN_SECONDS
        try:
            self._marker.unlink(missing_ok=True)
        except OSError as fault:
            logger.error("the journal %s is out of date and cannot be removed: %s", self.path, fault)
        if not self.void:
            logger.error(
                "the journal %s cannot be written: %s; a daemon killed now would lose its leases",
                self.path,
                error,
            )
        self.void = True

    def _validated(self) -> bool:
        """Whether another daemon could go on with it."""
        if self.void:
            try:
                self._marker.write_text(self._boot)
            except OSError:
                self._again = self._clock.now() + AGAIN_SECONDS
                return False
            logger.warning("the journal %s is written again", self.path)
            self.void = False
        return True


class PoolJournal:
    """Implements `Journal` in a file that the pools of a daemon share."""

    def __init__(self, file: JournalFile, pool: str) -> None:
        self._file = file
        self._pool = pool
        past = file.past(pool)
        self._totals = _json(past.totals)
        # All that there is, so that a file that missed something can be written anew.
        self._entries = {entry.id: entry for entry in past.entries}
        self._templates = {entry.made_from: entry.origin for entry in past.entries if entry.origin}
        self._new_templates: dict[str, Template] = {}
        self._noted: OrderedDict[str, Entry | None] = OrderedDict()
        self._endings: deque[Ending] = deque(maxlen=REMEMBERED_ENDINGS)

    def past(self) -> Past:
        return self._file.past(self._pool)

    def keep(self, entry: Entry) -> None:
        self._noted[entry.id] = self._entries[entry.id] = entry
        if entry.origin is not None and entry.made_from not in self._templates:
            self._learn(entry.made_from, entry.origin)

    def _learn(self, digest: str, template: Template) -> None:
        """Once for each that the pool is given; those of which no sandbox is left are forgotten then."""
        used = {entry.made_from for entry in self._entries.values()}
        self._templates = {known: self._templates[known] for known in self._templates.keys() & used}
        self._templates[digest] = self._new_templates[digest] = template

    def forget(self, sandbox_id: str) -> None:
        self._noted[sandbox_id] = None
        self._entries.pop(sandbox_id, None)

    def ended(self, ending: Ending) -> None:
        self._endings.append(ending)

    def commit(self, totals: Totals) -> None:
        if not (self._noted or self._endings or self._file.void):
            return
        self._totals = _json(totals)
        self._file.write(self)
        if self._file.void:
            # All will be written then, and this would grow meanwhile.
            self._noted.clear()
            self._new_templates.clear()

    def written(self) -> None:
        """The file's word that it has all that was noted."""
        self._noted.clear()
        self._new_templates.clear()
        self._endings.clear()

    def changes(self) -> Statements:
        """Writes what was noted since."""
        kept = [self._kept(name, entry) for name, entry in self._noted.items()]
        return [*self._described(self._new_templates), *kept, *self._rest()]

    def everything(self) -> Statements:
        """Writes all that there is, whatever the file says now."""
        emptied = ("DELETE FROM sandboxes WHERE pool = ?", (self._pool,))
        kept = [self._kept(name, entry) for name, entry in self._entries.items()]
        return [emptied, *self._described(self._templates), *kept, *self._rest()]

    def _described(self, new: dict[str, Template]) -> Statements:
        """Where there are new templates, all are written: those that are forgotten go with this."""
        if not new:
            return []
        emptied = ("DELETE FROM templates WHERE pool = ?", (self._pool,))
        return [emptied, *(self._template(digest, known) for digest, known in self._templates.items())]

    def _template(self, digest: str, template: Template) -> tuple[str, tuple[object, ...]]:
        return "INSERT INTO templates VALUES (?, ?, ?)", (self._pool, digest, template_record.dump(template))

    def _kept(self, sandbox_id: str, entry: Entry | None) -> tuple[str, tuple[object, ...]]:
        if entry is None:
            return "DELETE FROM sandboxes WHERE id = ?", (sandbox_id,)
        return "INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?)", (sandbox_id, self._pool, _json(entry))

    def _rest(self) -> Statements:
        statements: Statements = []
        for ending in self._endings:
            values = (ending.id, self._pool, _json(ending))
            statements.append(("INSERT OR REPLACE INTO endings VALUES (?, ?, ?)", values))
        if self._endings:
            too_old = "DELETE FROM endings WHERE rowid <= (SELECT max(rowid) - ? FROM endings)"
            statements.append((too_old, (REMEMBERED_ENDINGS,)))
        statements.append((TOTALS, (self._pool, self._totals)))
        return statements


def _past(db: sqlite3.Connection, pool: str) -> Past:
    def read(column: str, table: str, order: str) -> list[dict[str, Any]]:
        rows = db.execute(f"SELECT {column} FROM {table} WHERE pool = ? ORDER BY {order}", (pool,))  # noqa: S608
        return [json.loads(text) for (text,) in rows]

    totals = read("totals", "totals", "pool")
    rows = db.execute("SELECT digest, template FROM templates WHERE pool = ?", (pool,))
    templates = {digest: template_record.load(text) for digest, text in rows}
    entries = [
        Entry(
            **{
                **values,
                "branches": tuple(values["branches"]),
                "origin": templates.get(values["made_from"]),
            }
        )
        for values in read("entry", "sandboxes", "id")
    ]
    entries.sort(key=attrgetter("created"))
    return Past(
        entries,
        [Ending(**values) for values in read("ending", "endings", "rowid")],
        Totals(**totals[0]) if totals else Totals(),
    )


def _json(value: Entry | Ending | Totals) -> str:
    """The template of an entry is kept beside it, once for all that were made from it."""
    if isinstance(value, Ending):
        # What a sandbox died of may hold what is no text.
        return json.dumps(dataclasses.asdict(value))
    # A third of what json takes, in each commit twice.
    return to_json(value, exclude=NOT_WRITTEN).decode()


def _read_boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
