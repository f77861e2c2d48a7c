"""Judges what sandboxes are made with: namespaces, overlays, control groups, Docker. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sandboxd.doctor import needs
from sandboxd.doctor.facts import Demand, Directory, Engine, Facts
from sandboxd.doctor.findings import Finding, Verdict

ENFORCED = ("cpu", "memory", "pids")
# The Engine's storage drivers that copy whole images for each container.
SLOW_STORAGE = ("vfs", "devicemapper")


def features(facts: Facts, demands: Sequence[Demand]) -> Iterator[Finding]:
    """What must be there at all, for the backends that the demands name."""
    backends = {demand.backend for demand in demands}
    if "namespace" in backends:
        yield _platform(facts)
        yield _namespaces(facts)
        yield from _overlays(facts, demands)
        yield _groups(facts)
    yield from _docker(facts.engine, [demand for demand in demands if demand.backend == "docker"])
    yield from _bridges(facts)


def _platform(facts: Facts) -> Finding:
    ok = facts.platform == "linux"
    fix = "" if ok else 'use backend = "docker"'
    return Finding("platform", "kernel", _verdict(ok), facts.platform, "linux", fix)


def _namespaces(facts: Facts) -> Finding:
    title, needed = "namespaces can be made", "yes"
    if facts.namespaces is None:
        return Finding("can_unshare", title, Verdict.UNKNOWN, "not tried", needed)
    if not facts.namespaces:
        return Finding("can_unshare", title, Verdict.OK, "yes", needed)
    return Finding("can_unshare", title, Verdict.FAILURE, facts.namespaces, needed, _unshare_fix(facts))


def _unshare_fix(facts: Facts) -> str:
    """The switch that is known to forbid it, in the order in which kernels look at them."""
    for name, forbids, allows in SWITCHES:
        if facts.sysctl.get(name) == forbids and not (name.startswith("kernel.apparmor") and facts.root):
            return f"sysctl -w {name}={allows}"
    return "allow user namespaces; a container needs --privileged, or seccomp and AppArmor unconfined"


SWITCHES = (
    ("user.max_user_namespaces", 0, 16384),
    ("kernel.unprivileged_userns_clone", 0, 1),
    ("kernel.apparmor_restrict_unprivileged_userns", 1, 0),
)


def _overlays(facts: Facts, demands: Sequence[Demand]) -> Iterator[Finding]:
    if facts.has_overlay is not None:
        fix = "" if facts.has_overlay else "modprobe overlay"
        current = "yes" if facts.has_overlay else "not loaded"
        yield Finding("overlay", "overlayfs", _verdict(facts.has_overlay), current, "yes", fix)
    with_image = any(demand.image for demand in demands if demand.backend == "namespace")
    for directory in facts.directories:
        if directory.setting == "state_dir":
            yield _overlay_in(directory, Verdict.FAILURE)
        elif directory.setting == "images_dir":
            yield _overlay_in(directory, Verdict.FAILURE if with_image else Verdict.WARNING)


def _overlay_in(directory: Directory, bad: Verdict) -> Finding:
    check = f"overlay_{directory.setting}"
    title = f"overlays on {directory.setting} ({directory.path}, {directory.kind or 'unknown file system'})"
    if directory.overlay is None:
        return Finding(check, title, Verdict.UNKNOWN, "not tried", "yes")
    if not directory.overlay:
        return Finding(check, title, Verdict.OK, "yes", "yes")
    fix = f"name another {directory.setting}, on ext4, xfs or tmpfs"
    return Finding(check, title, bad, directory.overlay, "yes", fix)


def _groups(facts: Facts) -> Finding:
    enforced = [name for name in ENFORCED if name in facts.groups.enforced]
    version = f"v{facts.groups.version}" if facts.groups.version else "none"
    ok = len(enforced) == len(ENFORCED)
    fix = (
        "run as root, or `systemd-run --user --scope -p Delegate=yes sandboxd serve`; without it memory is"
        " bounded for each process alone, processes by RLIMIT_NPROC, processor time not at all"
    )
    return Finding(
        check="cgroups",
        title="limits by control groups",
        verdict=Verdict.OK if ok else Verdict.WARNING,
        current=f"{version}: {', '.join(enforced) or 'not delegated'}",
        needed=", ".join(ENFORCED),
        fix="" if ok else fix,
    )


def _docker(engine: Engine | None, demands: Sequence[Demand]) -> Iterator[Finding]:
    wanted = bool(demands)
    needed = "answers" if wanted else "not used"
    if engine is None:
        yield Finding("docker", "Docker Engine", Verdict.UNKNOWN, "not asked", needed)
        return
    if engine.fault:
        fix = "install Docker, start it, and join the group docker" if wanted else ""
        verdict = Verdict.FAILURE if wanted else Verdict.OK
        yield Finding("docker", "Docker Engine", verdict, engine.fault, needed, fix)
        return
    said = f"{engine.version}, {engine.storage}, control groups by {engine.cgroup_driver or 'none'}"
    yield Finding("docker", "Docker Engine", Verdict.OK, said, needed)
    if wanted:
        yield from _docker_quality(engine, demands)


def _docker_quality(engine: Engine, demands: Sequence[Demand]) -> Iterator[Finding]:
    runtimes = sorted({demand.runtime for demand in demands if demand.runtime})
    missing = [runtime for runtime in runtimes if runtime not in engine.runtimes]
    fix = f"add {', '.join(missing)} to the Engine's settings (daemon.json, runtimes)" if missing else ""
    offered = ", ".join(engine.runtimes) or "none"
    yield Finding(
        "docker_runtimes", "its runtimes", _verdict(not missing), offered, ", ".join(runtimes) or "any", fix
    )
    slow = engine.storage in SLOW_STORAGE
    fix = 'set "storage-driver": "overlay2" in daemon.json' if slow else ""
    verdict = Verdict.WARNING if slow else Verdict.OK
    yield Finding(
        "docker_storage", "its storage driver", verdict, engine.storage or "unknown", "overlay2", fix
    )
    bounded = engine.cgroup_driver not in ("", "none")
    fix = "" if bounded else "run the Engine as root, or delegate control groups to it"
    verdict = Verdict.OK if bounded else Verdict.WARNING
    yield Finding(
        "docker_limits", "its limits", verdict, engine.cgroup_driver or "none", "a cgroup driver", fix
    )


def _bridges(facts: Facts) -> Iterator[Finding]:
    """Only said: no sandbox of ours is attached to a bridge, which ends at its thousandth port."""
    if not facts.bridges:
        return
    name, ports = max(facts.bridges.items(), key=lambda item: item[1])
    current = f"{ports} of {needs.BRIDGE_PORTS} on {name}"
    yield Finding("bridge_ports", "bridge ports", Verdict.OK, current, "0", "", ports, 0)


def _verdict(ok: bool) -> Verdict:
    return Verdict.OK if ok else Verdict.FAILURE
