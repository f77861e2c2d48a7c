"""Runs a daemon as a child process of a program that needs one for itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

from sandboxd.addresses import PATH_BYTES_LIMIT, SOCKET_NAME
from sandboxd.errors import BackendUnavailable
from sandboxd.lifetime import ended

READY_TIMEOUT_SECONDS = 60.0
STOP_TIMEOUT_SECONDS = 60.0


@contextlib.asynccontextmanager
async def child_daemon(
    state_dir: Path,
    *,
    config: Path | None = None,
    log: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> AsyncIterator[str]:
    """A daemon with its own state directory for as long as the block runs; yields its address.

    It ends with this process, however this process ends, and takes its sandboxes with it. Its log goes
    to `log`, by default `daemon.log` in the state directory. Its environment is this process's, with
    `variables` over it. Raises BackendUnavailable with the daemon's
    own last line when it does not come up.
    """
    await asyncio.to_thread(state_dir.mkdir, parents=True, exist_ok=True)
    log = log or state_dir / "daemon.log"
    setting = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    with _socket(state_dir) as listen, log.open("ab") as errors:
        arguments = ["--state-dir", str(state_dir), "--with-parent", *listen]
        if config is not None:
            arguments += ["--config", str(config)]
        # Not by the event loop: uvloop forks with gRPC's locks held by who knows whom; this makes no copy.
        process = await asyncio.to_thread(
            subprocess.Popen,
            [*setting, sys.executable, "-m", "sandboxd", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # Ctrl-C goes to the whole foreground group; the daemon must outlive its users' last calls.
            start_new_session=True,
        )
        try:
            yield await _address(process, log)
        finally:
            await _stop(process)


@contextlib.contextmanager
def _socket(state_dir: Path) -> Iterator[list[str]]:
    """How the daemon is told where to listen: by itself it does so in its state directory.

    Where that directory's path is longer than an address may be, its socket is named by a descriptor of ours.
    """
    if len(os.fsencode(state_dir.resolve() / SOCKET_NAME)) <= PATH_BYTES_LIMIT:
        yield []
        return
    directory = os.open(state_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield ["--listen", f"unix:/proc/{os.getpid()}/fd/{directory}/{SOCKET_NAME}"]
    finally:
        os.close(directory)


async def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    if process.stdout is None:
        raise AssertionError("the daemon was started with a pipe")
    reading = asyncio.ensure_future(asyncio.to_thread(process.stdout.readline))
    try:
        async with asyncio.timeout(READY_TIMEOUT_SECONDS):
            line = (await asyncio.shield(reading)).decode()
    except TimeoutError:
        raise BackendUnavailable(
            f"the daemon did not come up within {READY_TIMEOUT_SECONDS:g} s; its log is {log}"
        ) from None
    if " serving " not in line:
        await ended(process.pid)
        lines = (await asyncio.to_thread(log.read_text, errors="replace")).strip().splitlines()
        last = lines[-1].removeprefix("sandboxd: ") if lines else "no word in its log"
        raise BackendUnavailable(f"the daemon did not come up: {last}")
    return line.partition(" serving ")[2].partition(";")[0].split()[0]


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
            await ended(process.pid)
    except TimeoutError:
        process.kill()
        await ended(process.pid)
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def toml_value(value: object) -> str:
    """A value as TOML writes it; strings, numbers, booleans and lists of them."""
    return json.dumps(value)
