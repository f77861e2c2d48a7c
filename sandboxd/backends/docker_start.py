"""How one container starts: what the Engine is told, and how its first process says that it is ready."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import docker.errors
import docker.types

from sandboxd import stopwatch
from sandboxd.backends import seccomp, syscalls
from sandboxd.backends.docker_images import Image
from sandboxd.backends.engine import Engine, EngineRefused, EngineStream, of_full_disk
from sandboxd.backends.native import PROGRAM
from sandboxd.errors import Phase, StartFailed
from sandboxd.telemetry.recorder import step
from sandboxd.types import Template

# Where the guest and its socket appear in a container.
INSIDE = "/.sandboxd"
# Tells the daemon, on the container's standard output, that commands may come.
READY = b"ready\n"
SOCKET, FILTER = "guest.sock", "filter"
GUEST = [f"{INSIDE}/{PROGRAM.name}", "container", f"{INSIDE}/run/{SOCKET}", READY.decode()]
# A shell as first process reaps orphans while it waits for its own child.
IDLE = "echo ready; exec >/dev/null 2>&1 </dev/null; while :; do sleep 86400; done"
LOG_BYTES = 4096
# The Engine refuses these for what the template says; no repetition mends it.
FATAL = re.compile(
    r"unknown (or invalid )?runtime|executable file not found|minimum memory limit|cpus? .*available"
    r"|invalid (reference|runtime|container name|mount)",
    re.IGNORECASE,
)


class Start:
    """One attempt to start one container; remembers how far it came and what the container said."""

    def __init__(self, engine: Engine, name: str, directory: Path, guest: Path | None) -> None:
        self._engine = engine
        self._name = name
        self._directory = directory
        self._guest = guest
        self._phase = Phase.CREATE
        self._log = b""

    async def run(self, template: Template, image: Image, labels: dict[str, str]) -> None:
        """Returns when the first process has said that it is ready. Raises StartFailed, APIError."""
        _make_directory(self._directory)
        settings = _settings(template, image.user, self._first_process())
        host = _host_config(template, self._binds())
        with step("create"):
            await self._engine.call(
                lambda api: api.create_container(
                    image.reference,
                    name=self._name,
                    labels=labels,
                    host_config=api.create_host_config(**host),
                    **settings,
                )
            )
        self._enter(Phase.START)
        # Attached before the start, so that not a byte of a first process that dies at once is missed.
        output = await self._engine.stream(f"/containers/{self._name}/attach?stream=1&stdout=1&stderr=1")
        try:
            with step("start"):
                await self._engine.call(lambda api: api.start(self._name))
            self._enter(Phase.READY)
            with step("ready"):
                await self._ready(output)
        finally:
            output.close()
        # No command has run yet: the sandbox's user never sees the key, and from now on nothing can be put in
        # the socket's place.
        (self._directory / FILTER).unlink(missing_ok=True)
        self._directory.chmod(0o711)

    def _first_process(self) -> list[str]:
        if self._guest is None:
            return ["sh", "-c", IDLE]
        if syscalls.MACHINE not in seccomp.AUDIT_ARCH:
            # The filter is written for two kinds; elsewhere there is the Engine's alone.
            return GUEST
        path = self._directory / FILTER
        path.write_bytes(_filter())
        path.chmod(0o444)
        return [*GUEST, f"{INSIDE}/run/{FILTER}"]

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        stopwatch.enter(phase)

    def _binds(self) -> dict[str, dict[str, str]]:
        if self._guest is None:
            return {}
        return {
            str(self._guest.resolve()): {"bind": f"{INSIDE}/{PROGRAM.name}", "mode": "ro"},
            str(self._directory.resolve()): {"bind": f"{INSIDE}/run", "mode": "rw"},
        }

    async def _ready(self, output: EngineStream) -> None:
        async for _, piece in output.frames():
            self._log = (self._log + piece)[-LOG_BYTES:]
            if self._log.endswith(READY):
                return
        raise self.failed("its first process ended before it was ready")

    def failed(self, what: str, *, retryable: bool = True) -> StartFailed:
        """The error for this attempt, with the container's last lines."""
        log = self._log.decode(errors="replace").strip()
        last = f" ({log.splitlines()[-1]})" if log else ""
        return StartFailed(
            f"container {self._name}: {what}{last}",
            phase=self._phase,
            retryable=retryable,
            metadata={"log": log, "container": self._name, **of_full_disk(what)},
        )

    def refused(self, error: docker.errors.APIError | EngineRefused) -> StartFailed:
        """The error for the Engine's refusal."""
        text = str(error.explanation if isinstance(error, docker.errors.APIError) else error)
        return self.failed(
            f"the Docker Engine refused to {self._phase} it: {text}", retryable=not FATAL.search(text)
        )


@functools.cache
def _filter() -> bytes:
    """What the guest puts on: its key, and the same filter as in a sandbox of the namespace backend."""
    key = os.urandom(seccomp.KEY_BYTES)
    return key + seccomp.program(syscalls.MACHINE, key)


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o777)  # The guest's user binds its socket here; the state directory above is closed.


def _settings(template: Template, user: str, program: list[str]) -> dict[str, Any]:
    return {
        "entrypoint": program,
        "user": user,
        "hostname": "sandbox" if template.network.value == "none" else None,
        "working_dir": "/",
        "healthcheck": {"test": ["NONE"]},
    }


def _host_config(template: Template, binds: dict[str, dict[str, str]]) -> dict[str, Any]:
    limits = template.limits
    files = limits.open_files
    return {
        "network_mode": template.network.value,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": {"/tmp": "rw,exec,nosuid,nodev,mode=1777"},  # noqa: S108 - inside the container
        "binds": binds,
        "mem_limit": limits.memory_bytes,
        "memswap_limit": limits.memory_bytes,
        "pids_limit": limits.pids,
        "nano_cpus": None if limits.cpu_count is None else int(limits.cpu_count * 1e9),
        "ulimits": [] if files is None else [docker.types.Ulimit(name="nofile", soft=files, hard=files)],
        "log_config": {"Type": "none", "Config": {}},
        "runtime": template.runtime,
    }
