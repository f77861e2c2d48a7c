"""Facts that only a try can tell: namespaces, overlays, the Docker Engine. Each try undoes what it did."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from sandboxd.doctor.facts import Directory, Engine
from sandboxd.errors import BackendUnavailable
from sandboxd.scratch import scratch_directory

TRY_SECONDS = 30.0
# The Engine's `info` on a host with a thousand containers.
ENGINE_SECONDS = 20.0
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
# As the namespace backend mounts it (`backends.rootfs.Base.assemble`).
OVERLAY_OPTIONS = "lowerdir={lower},upperdir={home}/upper,workdir={home}/work,userxattr"


def try_namespaces() -> str | None:
    """Makes one of each kind for a moment; empty when that worked, else what was said against it."""
    kinds = ("--pid", "--net", "--ipc", "--uts", "--cgroup", "--fork")
    return _said((*UNSHARE, *kinds, "true"))


def try_overlay(state: Directory, images: Directory | None = None) -> tuple[Directory, ...]:
    """Mounts an overlay with its writable layer in `state`, then one over `images`, in its own namespace.

    A directory that this user cannot write to says nothing: it is left as it was.
    """
    with contextlib.ExitStack() as held:
        try:
            path = str(held.enter_context(scratch_directory(".sandboxd-doctor-", Path(state.path))))
        except OSError:
            return tuple(directory for directory in (state, images) if directory is not None)
        for name in ("upper", "work", "lower", "here"):
            (Path(path) / name).mkdir()
        tried = [replace(state, overlay=_mount(path, f"{path}/lower"))]
        if images is not None:
            # Where the writable layer cannot be, nothing is learnt of what would lie below it.
            tried.append(images if tried[0].overlay else replace(images, overlay=_mount(path, images.path)))
    return tuple(tried)


def _mount(home: str, lower: str) -> str | None:
    if set(home + lower) & set(',:\\"'):
        return None  # What these mean to mount(8) would be tried instead.
    options = OVERLAY_OPTIONS.format(lower=lower, home=home)
    return _said((*UNSHARE, "mount", "-t", "overlay", "overlay", "-o", options, f"{home}/here"))


def _said(command: tuple[str, ...]) -> str | None:
    """The last line of its complaint; empty without one, None when it cannot be run."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=TRY_SECONDS,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


async def ask_engine() -> Engine:
    """What the Docker Engine says of itself, or why it does not."""
    # Imported late: the other tries need no Docker SDK.
    from sandboxd.backends.engine import Engine as DockerEngine

    engine = DockerEngine(call_seconds=ENGINE_SECONDS)
    try:
        info = await engine.open()
    except BackendUnavailable as error:
        return Engine(fault=error.message)
    finally:
        engine.close()
    return Engine(
        version=str(info.get("ServerVersion", "?")),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        storage=str(info.get("Driver", "")),
        cgroup_driver=str(info.get("CgroupDriver", "")),
        root=str(info.get("DockerRootDir", "")),
    )


async def try_all(state: Directory, images: Directory) -> tuple[str | None, tuple[Directory, ...]]:
    """Namespaces and overlays, beside the event loop."""
    namespaces = await asyncio.to_thread(try_namespaces)
    return namespaces, await asyncio.to_thread(try_overlay, state, images)
