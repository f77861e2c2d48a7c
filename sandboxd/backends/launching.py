"""Starts the keeper of a launcher, a program of its own, and hears whether sandboxes can be made."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from sandboxd.backends import bare
from sandboxd.backends.lock_file import is_at
from sandboxd.errors import BackendUnavailable
from sandboxd.types import Limits

START_SECONDS = 20.0
LOCK_FILE, LOG_FILE = "launcher.lock", "launcher.log"


async def launch(python: str, spec: Mapping[str, object]) -> bool:
    """Returns once a launcher answers its socket; `spec` is a `keeper.Spec`. False where that is one which
    another daemon has started. Raises BackendUnavailable.
    """
    argv = bare.command(python, "sandboxd.backends.keeper")
    try:
        done = await asyncio.to_thread(_answered, argv, json.dumps(spec).encode())
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"the launcher did not start within {START_SECONDS:g} s") from error
    except (OSError, RuntimeError) as error:
        # No process or no thread more: both pass, or an operator mends them.
        raise BackendUnavailable(
            f"the launcher cannot be started: {error}; see this user's limits (ulimit -a) and the memory left"
        ) from error
    answer = done.stdout.decode(errors="replace").strip()
    if answer not in ("ready", "answered"):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BackendUnavailable(f"namespace sandboxes cannot be made here: {answer or last or 'no answer'}")
    return answer == "ready"


def check_version(hello: Mapping[str, object], ours: int, state: Path) -> None:
    """Raises BackendUnavailable where the launcher is another version's."""
    if hello["version"] != ours:
        raise BackendUnavailable(
            f"the launcher in {state} speaks version {hello['version']}, this daemon {ours}; stop it"
            f" (pid {hello['pid']}) and start again"
        )


def remove_state(state: Path) -> None:
    """Takes the directory away unless a launcher that is not ours uses it."""
    try:
        with (state / LOCK_FILE).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not is_at(lock.fileno(), lock.name):
                return  # Another has taken it away since, and the name is a launcher's by now.
            for name in (LOG_FILE, LOCK_FILE):
                (state / name).unlink(missing_ok=True)
        state.rmdir()
    except OSError:
        return


def ends_of(*pids: int) -> list[asyncio.Future[None]]:
    """`end_of` each. Raises BackendUnavailable, and then watches none."""
    ends: list[asyncio.Future[None]] = []
    try:
        for pid in pids:
            ends.append(end_of(pid))  # noqa: PERF401 - those before one that fails are needed
    except BackendUnavailable:
        for end in ends:
            end.cancel()
        raise
    return ends


def end_of(keeper: int) -> asyncio.Future[None]:
    """Resolved when this process, no child of ours, has ended: nothing is left of its launcher then. When
    cancelled it is watched no more.

    Raises BackendUnavailable where it cannot be watched.
    """
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()
    try:
        fd = os.pidfd_open(keeper)
    except ProcessLookupError:
        end.set_result(None)
        return end
    except OSError as error:
        raise BackendUnavailable(
            f"the launcher's keeper, pid {keeper}, cannot be watched: {error.strerror}; where these are too"
            " many open files, raise the limit (ulimit -n)"
        ) from error

    def ended() -> None:
        if not end.done():
            end.set_result(None)

    def forget(_: asyncio.Future[None]) -> None:
        loop.remove_reader(fd)
        os.close(fd)

    loop.add_reader(fd, ended)
    end.add_done_callback(forget)
    return end


def _answered(argv: list[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    """Not by the event loop: some hand their own descriptors down, and a launcher would hold them."""
    return subprocess.run(
        argv,
        input=given,
        capture_output=True,
        env={},
        cwd="/",
        start_new_session=True,
        timeout=START_SECONDS,
        check=False,
    )


@functools.cache
def known_limits(limits: Limits) -> dict[str, float]:
    """Those that are set, as an order to the launcher names them."""
    return {key: value for key, value in asdict(limits).items() if value is not None}
