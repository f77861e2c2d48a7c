"""Where what a command tells goes: to the connection that started it, which may hold it up."""

from __future__ import annotations

from sandboxd.guest import wire
from sandboxd.guest.peer import Peer


class Outlet:
    """What a command needs of whoever hears it. This one hears nothing and holds up nothing."""

    @property
    def congested(self) -> bool:
        """True while no more output may come."""
        return False

    def started(self, frame: bytes) -> None:
        """It runs, as this STARTED frame says; the first that is told."""

    def output(self, kind: int, offset: int, data: bytes) -> None:
        """A piece of the stream `kind`, of at most wire.PIECE bytes."""

    def ended(self, frame: bytes) -> None:
        """It ended or could not be started, as this EXITED frame says; the last that is told."""

    def hold_input(self, full: bool) -> None:
        """Whether its input waits, because the command does not read it."""


class Direct(Outlet):
    """To one connection, and no faster than that takes it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    @property
    def congested(self) -> bool:
        return self._peer.congested

    def started(self, frame: bytes) -> None:
        self._peer.send(frame)

    def output(self, kind: int, offset: int, data: bytes) -> None:
        self._peer.send(wire.frame(kind, wire.OFFSET.pack(offset), data))

    def ended(self, frame: bytes) -> None:
        self._peer.send(frame)

    def hold_input(self, full: bool) -> None:
        if full and not self._peer.paused:
            self._peer.paused = True
            self._peer.update()
        elif not full and self._peer.paused:
            self._peer.resume()
