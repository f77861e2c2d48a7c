"""The file system of a sandbox: what the launcher prepares once, and what each sandbox then mounts.

`Base` turns the launcher's own mount namespace into a small tree of its own, without a way back to the
host's: an empty root with /m, where a sandbox's root is put together, and /t, which holds all else: skel (the
lower layer of every sandbox), ro (the host's system directories, read-only), dev, proc, and state (the state
directory). A new mount namespace copies that tree, which is why it is small. A sandbox takes /t away as a
whole and moves what it has put together over the empty root. Not by `pivot_root`: that looks at every process
of the host, and so makes the thousandth sandbox dearer than the first. A sandbox of an image has bare in the
place of skel, over the image's layers, which are in l; one that begins where another was has copies of that
one's writable layer, state/sandboxes/branch.*, above them.
"""

from __future__ import annotations

import errno
import os
import stat

from sandboxd.backends import syscalls as sys
from sandboxd.backends.starter import PROGRAM, TREE
from sandboxd.backends.steps import HERE, UPPER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sandboxd.backends.steps import Step

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
# Copied from the host where they are there and everybody may read them.
ETC = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "pki/tls/certs",
    "profile",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
DIRECTORIES = {
    "dev": 0o755,
    "etc": 0o755,
    "home": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "proc": 0o555,
    "root": 0o700,
    "run": 0o755,
    "srv": 0o755,
    "sys/devices/system/cpu": 0o755,
    "tmp": 0o1777,
    "usr": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
# What every sandbox has, whatever its image brings: what is mounted upon, and what names the sandbox.
MOUNT_POINTS = ("dev", "proc", "sys/devices/system/cpu", "tmp")
OWN_FILES = ("etc/hosts", "etc/hostname")
UID = 1000
SYNTHETIC = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n"
    f"sandbox:x:{UID}:{UID}:sandbox:/workspace:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\ntty:x:5:\nsandbox:x:{UID}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n",
}
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
BRANCH_PREFIX = "branch."
STATE = f"{TREE}/state/sandboxes"
"""Where the sandboxes' directories are in the launcher's tree."""
VACANT_PREFIX = "vacant."
"""Of those among them that nobody has, see `vacancies`."""
# The blocks of steps: the host's system, and the end of every root.
BINDS, ROOT = 0, 1
WORKSPACE = "/workspace"
# One page holds them all.
MOUNT_OPTIONS_BYTES = 4096
# Covered by an empty file or directory; /proc is read-only besides.
MASKED = ("kcore", "keys", "kmsg", "sysrq-trigger", "timer_list", "acpi", "scsi", "bus", "irq", "fs")
SAFE = sys.MS_NOSUID | sys.MS_NODEV
DEVPTS = sys.MS_NOSUID | sys.MS_NOEXEC
READ_ONLY = sys.MOUNT_ATTR_RDONLY | sys.MOUNT_ATTR_NOSUID | sys.MOUNT_ATTR_NODEV


class Base:
    """The launcher's tree; `enter` makes it the root of the calling process."""

    def __init__(
        self, state: str, read_only_paths: list[str], owner: int, program: int, layers: int = -1
    ) -> None:
        """`owner` is the sandboxes' user as the launcher sees it; `program` and `layers` are descriptors of
        the guest's program and of the images' directory, which `enter` closes."""
        self._owner = owner
        self._program = program
        self._layers = layers
        self._state = state
        self._root = os.path.join(state, "base")
        self._base = self._root + TREE
        self._paths = read_only_paths
        self.binds: list[tuple[str, str]] = []
        self.masked: list[tuple[str, str]] = []

    def enter(self) -> None:
        """Needs its own mount and user namespace. Raises OSError."""
        sys.mount("", "/", flags=sys.MS_REC | sys.MS_PRIVATE)
        sys.mount("tmpfs", self._root, "tmpfs", SAFE, "mode=755")
        for name in (TREE, "/m"):
            os.mkdir(self._root + name, 0o755)
        # By its name the launcher's own way to it, as everybody's.
        os.symlink(f"{TREE}/proc".lstrip("/"), os.path.join(self._root, "proc"))
        sys.mount("tmpfs", self._base, "tmpfs", SAFE, "mode=755")
        for name in ("skel", "bare", "l", "ro", "dev", "proc", "state", "disk", "empty", "old"):
            os.mkdir(os.path.join(self._base, name), 0o755)
        self._copy_program()
        self._fill_skeleton()
        self._fill_bare()
        self._bind_system()
        self._make_devices()
        # Read-only: where one user is all there is, it owns this directory, which every sandbox sees.
        empty = os.path.join(self._base, "empty")
        sys.mount(empty, empty, flags=sys.MS_BIND)
        sys.harden_mounts(empty, READ_ONLY)
        if self._layers >= 0:
            layers = os.path.join(self._base, "l")
            sys.mount(f"/proc/self/fd/{self._layers}", layers, flags=sys.MS_BIND)
            sys.harden_mounts(layers, READ_ONLY)
            os.close(self._layers)
        for source, name in (("/proc", "proc"), (self._state, "state")):
            sys.mount(source, os.path.join(self._base, name), flags=sys.MS_BIND | sys.MS_REC)
        os.chdir(self._root)
        sys.pivot_root(".", f".{TREE}/old")
        os.chdir("/")
        sys.unmount(f"{TREE}/old")
        # This tree lies in the state directory, and so came with it a second time.
        sys.unmount(f"{TREE}/state/base")
        # What is left of it below a sandbox's own root.
        sys.mount("", "/", flags=sys.MS_REMOUNT | sys.MS_BIND | sys.MS_RDONLY | SAFE)
        self.masked = [
            (f"/m/proc/{name}", _cover(f"{TREE}/proc/{name}"))
            for name in MASKED
            if _there(f"{TREE}/proc/{name}")
        ]

    def _copy_program(self) -> None:
        """A copy, which the sandboxes' user may read and run wherever the original lies."""
        path = self._root + PROGRAM
        with open(self._program, "rb") as source:  # closes the descriptor, too
            _write(path, source.read())
        os.chmod(path, 0o555)  # noqa: S103  # whom it runs as is another user of the launcher's namespace

    def _skeleton(self, path: str) -> str:
        return os.path.join(self._base, "skel", path.lstrip("/"))

    def _fill_skeleton(self) -> None:
        for name, mode in DIRECTORIES.items():
            os.makedirs(self._skeleton(name), exist_ok=True)
            os.chmod(self._skeleton(name), mode)
        for name, text in SYNTHETIC.items():
            _write(self._skeleton(name), text.encode())
        for name in ETC:
            _copy(os.path.join("/etc", name), self._skeleton(os.path.join("etc", name)))
        _copy_processors(os.path.join(self._base, "skel"))
        os.symlink("/proc/mounts", self._skeleton("etc/mtab"))

    def _fill_bare(self) -> None:
        bare = os.path.join(self._base, "bare")
        for name in MOUNT_POINTS:
            os.makedirs(os.path.join(bare, name), exist_ok=True)
            os.chmod(os.path.join(bare, name), DIRECTORIES[name])
        os.mkdir(os.path.join(bare, "etc"), 0o755)
        for name in OWN_FILES:
            _write(os.path.join(bare, name), SYNTHETIC[name].encode())
        _copy_processors(bare)

    def _bind_system(self) -> None:
        for path in (*SYSTEM_DIRECTORIES, *self._paths):
            if os.path.islink(path) and path in SYSTEM_DIRECTORIES:
                os.symlink(os.readlink(path), self._skeleton(path))
            elif os.path.isdir(path):
                self._bind(path)
            elif path in self._paths:
                raise OSError(errno.ENOTDIR, "a read-only path that is no directory", path)

    def _bind(self, path: str) -> None:
        source = f"{TREE}/ro/{len(self.binds)}"
        os.mkdir(self._root + source)
        os.makedirs(self._skeleton(path), exist_ok=True)
        sys.mount(path, self._root + source, flags=sys.MS_BIND | sys.MS_REC)
        sys.harden_mounts(self._root + source, READ_ONLY)
        self.binds.append((source, "/m" + path))

    def _make_devices(self) -> None:
        devices = os.path.join(self._base, "dev")
        sys.mount("tmpfs", devices, "tmpfs", sys.MS_NOSUID | sys.MS_NOEXEC, "mode=755")
        for name in DEVICES:
            _write(os.path.join(devices, name), b"")
            sys.mount(f"/dev/{name}", os.path.join(devices, name), flags=sys.MS_BIND)
        for name, target in DEVICE_LINKS.items():
            os.symlink(target, os.path.join(devices, name))
        for name in ("pts", "shm"):
            os.mkdir(os.path.join(devices, name))
        sys.mount(
            "", devices, flags=sys.MS_REMOUNT | sys.MS_BIND | sys.MS_RDONLY | sys.MS_NOSUID | sys.MS_NOEXEC
        )

    def steps(
        self,
        sandbox_id: str,
        cwd: str,
        limits: dict[str, float],
        lower: list[str],
        *,
        host_system: bool,
        has_work: bool = False,
    ) -> list[Step]:
        """What makes the sandbox's root and moves the process into it.

        `lower` are the directories below its writable layer, the highest first; with `has_work` its place has
        the overlay's own directory, which another one left. Needs a copy of the
        launcher's mount namespace and new pid, network and ipc namespaces. Raises OSError.
        """
        home = f"{STATE}/{sandbox_id}"
        disk = limits.get("disk_bytes")
        steps: list[Step] = []
        if disk is not None:
            # Bounded by a file system of its own, in memory; the overlay then covers it.
            home = f"{TREE}/disk"
            steps.append(("mount", "tmpfs", home, "tmpfs", SAFE, f"mode=755,size={int(disk)}"))
        layers = ":".join([*lower, f"{TREE}/skel"] if host_system else [f"{TREE}/bare", *lower])
        options = f"lowerdir={layers},upperdir={home}/upper,workdir={home}/work,userxattr,volatile"
        if len(options) >= MOUNT_OPTIONS_BYTES:
            raise OSError(errno.E2BIG, f"{len(lower)} layers are more than one mount takes")
        # Memory, too, and counted as such: half of the limit, or filling it would get processes killed.
        size = int(limits.get("memory_bytes", 2 << 30)) // 2
        size = size if disk is None else min(size, int(disk))
        return [
            *steps,
            ("mkdir", HERE, f"{home}/upper", 0o755),
            *([] if has_work and disk is None else [("mkdir", HERE, f"{home}/work", 0o755)]),
            *([] if disk is None else self._given(f"{home}/upper", sandbox_id)),
            ("mount", "overlay", "/m", "overlay", SAFE, options),
            ("mount", f"{TREE}/dev", "/m/dev", "", sys.MS_MOVE, ""),
            ("mount", "tmpfs", "/m/tmp", "tmpfs", SAFE, f"mode=1777,size={size}"),
            ("mount", "tmpfs", "/m/dev/shm", "tmpfs", SAFE | sys.MS_NOEXEC, f"mode=1777,size={size}"),
            ("mount", "devpts", "/m/dev/pts", "devpts", DEVPTS, "newinstance,ptmxmode=0666"),
            # After /tmp, below which one of the host's directories may lie.
            *([("block", BINDS)] if host_system else []),
            ("block", ROOT),
            # Only now, and with every link in it read as text: what an image or a sandbox left there may be
            # one, and those in /proc lead to this process's own descriptors.
            *(("workspace", path, self._owner, host_system) for path in dict.fromkeys((WORKSPACE, cwd))),
        ]

    @staticmethod
    def _given(upper: str, sandbox_id: str) -> list[Step]:
        """What is not on the host's disk can be copied by its descriptor only."""
        return [
            ("open", HERE, upper, os.O_RDONLY | os.O_DIRECTORY, UPPER, False),
            ("give", UPPER, sandbox_id),
            ("close", UPPER),
        ]

    def blocks(self) -> dict[int, list[Step]]:
        """The steps that are the same for all sandboxes, as `steps` names them."""
        binds: list[Step] = []
        for source, target in self.binds:
            binds.append(("makedirs", target))
            binds.append(("mount", source, target, "", sys.MS_BIND | sys.MS_REC, ""))
        root: list[Step] = [
            ("mount", "proc", "/m/proc", "proc", SAFE | sys.MS_NOEXEC | sys.MS_RDONLY, ""),
            *(("mount", cover, target, "", sys.MS_BIND, "") for target, cover in self.masked),
            ("umount", TREE),
            ("chdir", "/m"),
            ("mount", ".", "/", "", sys.MS_MOVE, ""),
            ("chroot", "."),
        ]
        return {BINDS: binds, ROOT: root}


def _there(path: str) -> bool:
    return os.path.lexists(path)


def _cover(path: str) -> str:
    return f"{TREE}/empty" if os.path.isdir(path) else "/m/dev/null"


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


def _copy_processors(root: str) -> None:
    """What libraries count processors by."""
    for name in ("online", "possible", "present"):
        path = f"/sys/devices/system/cpu/{name}"
        _copy(path, root + path)


def _copy(source: str, target: str) -> None:
    """A file, link or tree; what is not there or not readable for everybody is left out."""
    try:
        mode = os.lstat(source).st_mode
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISDIR(mode) and mode & 0o005 == 0o005:
            os.makedirs(target, exist_ok=True)
            for name in os.listdir(source):
                _copy(os.path.join(source, name), os.path.join(target, name))
        elif stat.S_ISREG(mode) and mode & 0o004:
            with open(source, "rb") as file:
                _write(target, file.read())
    except (FileNotFoundError, PermissionError):
        return
