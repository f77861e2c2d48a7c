"""What one sandbox takes of the host, by `Demand.kind`, and where each number comes from.

Measured on Linux 6.18 with Python's guest: the difference between a host with 10 and with 60 namespace
sandboxes (Docker 20.10: 4 and 16), idle, then with `sh -c "sleep 4; true"` running in every one of them.
Where a figure here is larger than what was measured, the rest is for what a rollout does besides. gVisor
(runsc of 2022, ptrace): the difference that 96 containers made, beside their first commands and idle.
"""

from __future__ import annotations

from collections.abc import Mapping

Need = Mapping[str, int]

RUNSC = "docker/runsc"

# Processes and threads. Namespace: 1 idle (the guest), 3 with a shell and its program; one more for a second
# command. Docker: 12.6 idle (the shim's threads, the guest), 15 with a shell and its program. gVisor: 71
# idle, 80 beside first commands. Fake: a shell and its program.
TASKS: Need = {"namespace": 4, "docker": 16, RUNSC: 88, "fake": 3}
# Those in this user's name and below this process's control group: Docker's are the Engine's.
OWN_TASKS: Need = {**TASKS, "docker": 0, RUNSC: 0}
# Descriptors of the daemon. Namespace: 1 idle (the connection that `ping` opened), 1 while a command runs, 1
# more for an operation beside it, and 1 for a caller that is a process of its own. Docker: one more, which
# watches the guest. Fake: three pipes and a pidfd of a command, its input, and the caller's.
DAEMON_FILES: Need = {"namespace": 3, "docker": 4, RUNSC: 4, "fake": 6}
# Open files of the whole host. Namespace: 12 idle, 37 with a shell and its program. Docker: 39 and 47.
# gVisor: 161 and 195.
HOST_FILES: Need = {"namespace": 48, "docker": 64, RUNSC: 224, "fake": 16}
# A namespace of each kind (pid, mnt, net, ipc, uts, cgroup).
NAMESPACES: Need = {"namespace": 1, "docker": 1, RUNSC: 1, "fake": 0}
# Where sandboxes cannot have users otherwise (`Facts.nested`).
USER_NAMESPACES: Need = {"namespace": 1, "docker": 0, RUNSC: 0, "fake": 0}
# Mounts in the host's own mount namespace; those of a namespace sandbox are in its own.
HOST_MOUNTS: Need = {"namespace": 0, "docker": 2, RUNSC: 2, "fake": 0}
# Memory when little is done. Namespace: 2.4 MiB idle; a shell and its program 2 more. Docker: 4.3 MiB idle
# at 960 containers. gVisor: 22 MiB idle.
MEMORY_BYTES: Need = {"namespace": 8 << 20, "docker": 16 << 20, RUNSC: 40 << 20, "fake": 4 << 20}
# Namespace: 28 KiB and 9 inodes idle (its directories, its socket); the rest is what a rollout writes.
DISK_BYTES: Need = {"namespace": 2 << 20, "docker": 2 << 20, RUNSC: 2 << 20, "fake": 1 << 20}
DISK_INODES: Need = {"namespace": 64, "docker": 64, RUNSC: 64, "fake": 16}
# What a program inside may want: one `tail -f` or file watcher, over a small project; one terminal.
INOTIFY_INSTANCES: Need = {"namespace": 1, "docker": 1, RUNSC: 1, "fake": 1}
INOTIFY_WATCHES: Need = {"namespace": 64, "docker": 64, RUNSC: 64, "fake": 64}
TERMINALS: Need = {"namespace": 1, "docker": 1, RUNSC: 1, "fake": 0}
# A sandbox whose programs speak to its own loopback: measured, in each of the two tables.
NEIGHBOURS: Need = {"namespace": 1, "docker": 1, RUNSC: 1, "fake": 0}

# What is kept back. Numbers below 300 are never given to a second round of processes (the kernel's
# RESERVED_PIDS); the launcher, its helpers and a burst of starting containers need the rest.
PIDS_KEPT = 300 + 200
TASKS_KEPT = 200
# In the sandboxes' own name: the launcher, what sweeps and copies for it, threads yet to be started.
USER_TASKS_KEPT = 64
# The daemon itself has 24 open; imports, forks and callers beyond the sandboxes' take more.
DAEMON_FILES_KEPT = 64
HOST_FILES_KEPT = 1024
# The launcher's own, and those of copies and imports under way.
NAMESPACES_KEPT = 16
# A sandbox has 20 in its own mount namespace; read-only paths of the host's bring more.
MOUNTS_KEPT = 100
# The kernel gives this many terminals to the host's own instance alone (kernel.pty.reserve).
TERMINALS_KEPT = 1024
NEIGHBOURS_KEPT = 64
# As every guest asks to have waiting (`backends.confine.GUEST_BACKLOG`).
BACKLOG = 512
# More callers than this do not knock in one moment.
BACKLOG_MOST = 4096
# A Linux bridge has 1,024 ports, one of them its own.
BRIDGE_PORTS = 1023
