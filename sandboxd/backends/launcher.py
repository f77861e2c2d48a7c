"""The process that has sandboxes made: knows each, says what it is made of, and tells daemons of its end.

Four processes, each the next one's parent:

    keeper     the user that started it: maps the users, waits for the launcher's end, removes what is left
    launcher   root of its own user namespace only; answers the control socket
    starter    a small program in C that copies itself: the launcher lists the steps, the copy takes them
    guest      one for each sandbox, PID 1 of its own pid namespace

They outlive the daemon. When no daemon has been connected for the grace, the launcher ends every sandbox
and itself. When the launcher or the starter dies, the kernel kills the guests, and the keeper removes their
remains.

Control socket: one JSON object a line. Requests carry `n`, which the answer repeats.
    {"do": "hello"}                          → {"version", "pid", "keeper", "enforced", "users", "pids",
                                                 "images"} and any other daemon is heard no more; none
                                                 after "close"
    {"do": "create", "id", "cwd", "limits", "host_network", "image", "layers", "branches", "host_system",
     "users"}
                                             → {} once its socket takes connections
    {"do": "copy", "id" or "from_branch", "to_branch" or "to_partial"}
                                             → {"size"}, or {"ended": why}; see `copies`
    {"do": "give up", "copy"}                → {}; the copy to that branch or partial then ends with an error
    {"do": "prune", "branch"}                → {} once nothing is left of it
    {"do": "branches"}                       → {"branches"}, those that are there
    {"do": "destroy", "id"}                  → {} once nothing is left of it
    {"do": "close"}                          → {} once nothing is left at all, then the launcher ends; at once
                                                 {"taken"} where another daemon was heard since and is there
An answer with `error` says what failed. {"lost": id, "why": text} comes unasked.
"""

from __future__ import annotations

import os
import signal
import socket
import sys as python

from sandboxd.backends.confine import ERROR_FILE, Confinement
from sandboxd.backends.control import Daemon
from sandboxd.backends.copies import Copies
from sandboxd.backends.line_socket import Lines
from sandboxd.backends.loop import IN, Loop, Timer
from sandboxd.backends.recipes import Recipes
from sandboxd.backends.records import Records
from sandboxd.backends.rootfs import BRANCH_PREFIX
from sandboxd.backends.starter import Starter
from sandboxd.backends.sweeper import LEAVE, LEFT, remove_tree
from sandboxd.backends.vacancies import Vacancies

VERSION = 3
CONTROL_SOCKET = "launcher.sock"
# Before connections are taken again when none could be: no descriptor was free, for instance.
ACCEPT_PAUSE_SECONDS = 0.05

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sandboxd.backends.control import Reply


class Sandbox:
    """One sandbox as the launcher knows it: its pid once it has one, its image, who waits for its end, a
    descriptor of its writable layer where that is in memory, its limits, and the vacant place that it took
    over, or that it leaves where `leaves` says so.
    """

    __slots__ = ("dead", "image", "leaves", "limits", "pid", "upper", "vacant", "waiting")

    def __init__(self) -> None:
        self.pid = 0
        self.image = ""
        self.dead = self.leaves = False
        self.limits: dict[str, float] = {}
        self.vacant = ""
        self.upper = -1
        self.waiting: list[Reply] = []


class Launcher:
    """Answers daemons until `close`, SIGTERM, or the grace without any."""

    def __init__(
        self,
        control: socket.socket,
        confinement: Confinement,
        records: Records,
        copies: int,
        helpers: tuple[socket.socket, socket.socket],
        grace: float,
    ) -> None:
        """`copies` is a descriptor, see `Copies`; `helpers` are the starter's socket and the sweeper's."""
        starter, sweeper = helpers
        self.loop = Loop()
        self._control = control
        self._holds = {"enforced": sorted(confinement.enforced), "users": not confinement.nested}
        self._recipes = Recipes(confinement)
        self._records = records
        self._copies = Copies(self.loop, copies)
        self._sweeper = Lines(self.loop, sweeper, self._on_swept, self._on_sweeper_gone)
        self._grace = grace
        self._keeper = os.getppid()
        self._daemons: set[Daemon] = set()
        self._greeted: Daemon | None = None
        self._sandboxes: dict[str, Sandbox] = {}
        self._pruning: dict[str, list[Reply]] = {}
        self._names: dict[int, str] = {}
        self._vacancies = Vacancies()
        self._closing: list[Reply] | None = None
        self._alone: Timer | None = None
        self._starter = Starter(self.loop, starter, self._on_ended, self._on_given, self._on_starter_gone)
        for number, steps in confinement.blocks().items():
            self._starter.define(number, steps)
        self._starter.prepare(confinement.once())
        self._watch()

    def _watch(self) -> None:
        self._woken, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._close(lambda _: None))
        self._control.setblocking(False)
        self.loop.watch(self._woken, IN, self._on_signal)
        self._listen()
        self._wait_for_daemon()

    def run(self) -> None:
        """Returns when no sandbox is left and none may come."""
        self.loop.run()

    # -- daemons

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._control.accept()
            daemon = Daemon(self, self.loop, sock)
        except BlockingIOError:
            return
        except OSError:
            python.excepthook(*python.exc_info())
            # What waits stays readable: without a pause this would be all that the launcher does.
            self.loop.unwatch(self._control.fileno())
            self.loop.after(ACCEPT_PAUSE_SECONDS, self._listen)
            return
        self._daemons.add(daemon)
        if self._alone is not None:
            self._alone.cancel()

    def _listen(self) -> None:
        if self._closing is None:
            self.loop.watch(self._control.fileno(), IN, self._accept)

    def greeted_by(self, daemon: Daemon) -> bool:
        """There is one daemon at a time: an earlier one has died, and its last orders may still be unread.
        False at the end, where nobody new is heard.
        """
        if self._closing is not None:
            return daemon is self._greeted
        self._greeted = daemon
        for other in self._daemons - {daemon}:
            other.dismiss()
        return True

    def is_anothers(self, daemon: Daemon) -> bool:
        """Whether it is not for this one to end all: another was heard since, and has not let go."""
        return self._greeted in self._daemons and self._greeted is not daemon

    def left(self, daemon: Daemon) -> None:
        """A daemon let go, or died."""
        self._daemons.discard(daemon)
        if self._daemons:
            return
        # The next one would not know of these.
        for name in [name for name, sandbox in self._sandboxes.items() if sandbox.dead]:
            self._destroy(name, lambda _: None)
        if self._alone is not None:
            self._alone.cancel()
        self._wait_for_daemon()

    def _wait_for_daemon(self) -> None:
        self._alone = self.loop.after(self._grace, lambda: self._close(lambda _: None))

    def asked(self, message: dict[str, Any], reply: Reply) -> None:
        """Does what a daemon asks."""
        what = message["do"]
        if what == "hello":
            pids = {name: sandbox.pid for name, sandbox in self._sandboxes.items() if not sandbox.dead}
            # Of a keeper that was killed the parent's number is somebody's who does not end with this one.
            keeper = self._keeper if os.getppid() == self._keeper else os.getpid()
            own = {"pid": os.getpid(), "keeper": keeper}
            images = {name: sandbox.image for name, sandbox in self._sandboxes.items() if sandbox.image}
            reply({"version": VERSION, **own, **self._holds, "pids": pids, "images": images})
        elif what == "create":
            self._create(message, reply)
        elif what == "destroy":
            self._destroy(message["id"], reply)
        elif what == "copy":
            upper = self._sandboxes[message["id"]].upper if message.get("id") in self._sandboxes else -1
            self._copies.begin(message, upper, self._while_it_lives(message, reply))
        elif what == "give up":
            self._copies.give_up(message["copy"])
            reply({})
        elif what == "prune":
            # A copy that a daemon which died had asked for may still be under way.
            self._copies.give_up(message["branch"])
            self._prune(f"{BRANCH_PREFIX}{message['branch']}", reply)
        elif what == "branches":
            found = [name for name in os.listdir(".") if name.startswith(BRANCH_PREFIX)]
            reply({"branches": [name.removeprefix(BRANCH_PREFIX) for name in found]})
        elif what == "close":
            self._close(reply)
        else:
            reply({"error": f"no request {what!r}"})

    # -- sandboxes

    def _create(self, message: dict[str, Any], reply: Reply) -> None:
        name = message["id"]
        if name in self._sandboxes or self._closing is not None:
            reply({"error": "the name is taken" if name in self._sandboxes else "the launcher is closing"})
            return
        limits = message["limits"]
        vacant = self._vacancies.next(limits)
        order = self._recipes.order(message, vacant, alike=self._vacancies.alike(vacant, limits))
        self._vacancies.take(vacant)
        # Known from now on, so that a destroy takes away what is made, even if that fails half-way.
        sandbox = self._sandboxes[name] = Sandbox()
        sandbox.vacant, sandbox.limits = vacant, limits
        try:
            if message["image"]:
                self._records.hold(message["image"])
                sandbox.image = message["image"]
            self._starter.start(order, lambda pid, failed: self._started(name, pid, failed, reply))
        except OSError as error:
            sandbox.dead = True
            reply({"error": f"{error.strerror}: {error.filename}" if error.filename else error.strerror})

    def _started(self, name: str, pid: int, failed: str, reply: Reply) -> None:
        sandbox = self._sandboxes[name]
        if failed:
            sandbox.dead = True
        else:
            sandbox.pid = pid
            self._names[pid] = name
        reply({"error": failed} if failed else {})
        if sandbox.waiting:  # since before it began
            self._end(name, sandbox)

    def _destroy(self, name: str, reply: Reply) -> None:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            reply({})
            return
        sandbox.waiting.append(reply)
        if len(sandbox.waiting) == 1:
            self._end(name, sandbox)

    def _end(self, name: str, sandbox: Sandbox) -> None:
        if sandbox.dead:
            self._sweep(name)
        elif sandbox.pid:
            self._starter.kill(sandbox.pid)

    def _while_it_lives(self, message: dict[str, Any], reply: Reply) -> Reply:
        """Of a sandbox that ended meanwhile a copy may lack what was swept by then."""

        def checked(answer: dict[str, Any]) -> None:
            sandbox = self._sandboxes.get(message.get("id", ""))
            gone = "id" in message and (sandbox is None or sandbox.dead or sandbox.waiting)
            reply({"ended": "it ended while its files were copied"} if gone else answer)

        return checked

    def _prune(self, name: str, reply: Reply) -> None:
        waiting = self._pruning.setdefault(name, [])
        waiting.append(reply)
        if len(waiting) == 1:
            self._sweep(name)

    def _close(self, reply: Reply) -> None:
        if self._closing is None:
            self._closing = []
            # Whoever comes now is for the next: this one makes nothing more.
            self.loop.unwatch(self._control.fileno())
            self._control.shutdown(socket.SHUT_RDWR)  # Copies that run have it, too.
            self._control.close()
            for name in list(self._sandboxes):
                self._destroy(name, lambda _: None)
        self._closing.append(reply)
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._closing is None or self._sandboxes:
            return
        for reply in self._closing:
            reply({})
        self.loop.stop()

    def _on_signal(self, _mask: int) -> None:
        """Of its own children only those that copy or help end here."""
        os.read(self._woken, 4096)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return

    def _on_given(self, name: str, upper: int) -> None:
        self._sandboxes[name].upper = upper

    def _on_ended(self, pid: int, status: int) -> None:
        name = self._names.pop(pid)
        sandbox = self._sandboxes[name]
        sandbox.dead = True
        if not sandbox.waiting and not self._daemons:
            # Nobody is there who would ask for it.
            sandbox.waiting.append(lambda _: None)
        if sandbox.waiting:
            self._sweep(name)
            return
        lost = {"lost": name, "why": _cause(name, status)}
        for daemon in self._daemons:
            daemon.send(lost)

    # -- remains

    def _sweep(self, name: str) -> None:
        sandbox = self._sandboxes.get(name)
        words = [name]
        if sandbox is not None:
            sandbox.leaves = sandbox.pid != 0 and self._closing is None and self._vacancies.wanted()
            if sandbox.leaves and not sandbox.vacant:
                sandbox.vacant = self._vacancies.new_name()
            words += [sandbox.vacant, LEAVE] if sandbox.leaves else [sandbox.vacant]
        self._sweeper.send(" ".join(words).encode())

    def _on_swept(self, line: bytes) -> None:
        name, _, error = os.fsdecode(line).partition(" ")
        waiting = self._pruning.pop(name, [])
        if name in self._sandboxes:
            sandbox = self._sandboxes.pop(name)
            waiting = sandbox.waiting
            if sandbox.leaves:
                self._vacancies.settled(sandbox.vacant, sandbox.limits if error == LEFT else None)
            error = "" if error == LEFT else error
            if sandbox.upper >= 0:
                os.close(sandbox.upper)
            if sandbox.image:
                self._records.release(sandbox.image)
        for reply in waiting:
            reply({"error": error} if error else {})
        self._end_if_empty()

    def _on_starter_gone(self) -> None:
        """Its guests have ended with it: all of them are lost, and the keeper cleans up."""
        raise OSError("the starter died")

    def _on_sweeper_gone(self) -> None:
        """Without it nothing can be removed: the keeper does it for all when this process ends."""
        raise OSError("the sweeper died")


def _cause(name: str, status: int) -> str:
    try:
        # The starter cuts it by bytes, and what it names is the template's, or the image's.
        with open(f"{name}/{ERROR_FILE}", errors="replace") as file:
            return f"it could not be set up: {file.read(4096)}"
    except OSError:
        pass
    if os.WIFSIGNALED(status):
        return f"its first process was killed by signal {os.WTERMSIG(status)}"
    return f"its first process exited with code {os.WEXITSTATUS(status)}"


def remove_remains(state: str) -> None:
    """Takes away what sandboxes of a dead launcher left in the state directory."""
    fd = os.open(state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in ("sandboxes", "base", CONTROL_SOCKET):
        remove_tree(fd, name)
    os.close(fd)
