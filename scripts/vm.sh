#!/usr/bin/env bash
# Tests of limits and isolation on a kernel with control groups of version 2, for hosts that have only version 1 and
# for what the running kernel cannot show: in an emulated machine with Debian's kernel and systemd, first as root, then
# as an ordinary user in a service with Delegate=yes. Needs root, Debian, mmdebstrap and qemu-system-x86_64 (it installs
# both), 4 GB of disk, and 5 to 10 minutes: the processor is emulated unless VM_ACCEL=kvm is given.
#   scripts/vm.sh [tests, as pytest takes them]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "vm: $*" >&2; exit 2; }
. scripts/packages.sh

[ "$(id -u)" = 0 ] || fail "making a system's root directory needs root"
[ -x .venv/bin/python ] || fail "there is no .venv; run: make .venv"
[ -x sandboxd/native/sandboxd-guest ] || fail "there is no guest; run: make guest"
tests=("$@")
[ $# -gt 0 ] || tests=(tests/sandboxd/test_{cgroup,namespace,namespace_limits,launcher_faults}.py)
for path in "${tests[@]}"; do [ -e "${path%%::*}" ] || fail "no such tests: $path"; done
for tool in mmdebstrap qemu-system-x86_64 mke2fs; do
    command -v "$tool" >/dev/null && continue
    need_packages "no $tool" mmdebstrap qemu-system-x86 e2fsprogs
    break
done

work=$(mktemp -d -t sandboxd-vm.XXXXXX)
machine=
trap '[ -z "$machine" ] || kill "$machine" 2>/dev/null; rm -rf "$work"' EXIT
root=$work/root

echo "vm: making Debian's root directory (2 to 4 minutes)"
suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
mapfile -t sources < <(ls /etc/apt/sources.list /etc/apt/sources.list.d/*.{list,sources} 2>/dev/null)
mmdebstrap --quiet --variant=minbase --include="systemd,systemd-sysv,dbus,python3,gcc,libc6-dev,libcap2-bin,\
busybox-static,iproute2,kmod,procps,util-linux,linux-image-cloud-amd64" \
    "$suite" "$root" "${sources[@]}" >"$work/debian.log" 2>&1 || { tail -5 "$work/debian.log" >&2; fail "no root directory"; }

# What the daemon and its tests import, in the versions of .venv; nothing of the training loop's.
.venv/bin/python - >"$work/packages" <<'END'
from importlib.metadata import PackageNotFoundError, distribution
from packaging.requirements import Requirement

found, todo = {}, ["sandboxd", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "anyio", "psutil", "grpcio-tools"]
while todo:
    name = todo.pop()
    if name in found:
        continue
    try:
        package = distribution(name)
    except PackageNotFoundError:
        continue
    found[name] = package.version
    for line in package.requires or []:
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            todo.append(needed.name.lower().replace("_", "-"))
print(*(f"{name}=={version}" for name, version in found.items() if name != "sandboxd"), sep="\n")
END
.venv/bin/python -m pip --disable-pip-version-check install -qq --no-deps --target "$root/opt/site" -r "$work/packages"
mkdir "$root/src"
git ls-files -co --exclude-standard -z | tar --null --files-from=- --ignore-failed-read -cf - | tar -C "$root/src" -xf -
cp sandboxd/native/sandboxd-guest "$root/src/sandboxd/native/"

printf '%s\n' "${tests[@]}" >"$root/tests"
cat >"$root/run-tests" <<'END'
#!/bin/bash
# As whoever runs it; the last line says how it ended.
export PYTHONPATH=/src:/opt/site PYTHONDONTWRITEBYTECODE=1 PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /src
echo "tests as $(id -un), in $(cut -d: -f3 /proc/self/cgroup)"
mapfile -t tests </tests
python3 -m pytest -q --color=no --tb=short -p no:cacheprovider --timeout 600 --timeout-method=signal "${tests[@]}"
code=$?
echo "tests as $(id -un) ended with $code"
END
cat >"$root/etc/systemd/system/tests.service" <<'END'
[Unit]
After=multi-user.target
[Service]
Type=oneshot
Delegate=yes
ExecStart=/run-tests
ExecStart=/usr/bin/systemd-run --quiet --uid=tester --wait --pipe --property=Delegate=yes --setenv=HOME=/home/tester /run-tests
ExecStopPost=/bin/systemctl poweroff --no-block
Environment=HOME=/root COLUMNS=120
TimeoutStartSec=infinity
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
[Install]
WantedBy=multi-user.target
END
chmod +x "$root/run-tests"
chroot "$root" useradd --create-home tester
chroot "$root" systemctl --quiet enable tests.service
chroot "$root" systemctl --quiet mask serial-getty@ttyS0.service

truncate -s 4G "$work/disk"
mke2fs -q -F -t ext4 -d "$root" "$work/disk"
echo "vm: starting it"
timeout "${VM_TIMEOUT:-3600}" qemu-system-x86_64 -accel "${VM_ACCEL:-tcg,thread=multi}" -cpu max -smp 2 -m 4096 -nographic -no-reboot \
    -nic none -drive "file=$work/disk,if=virtio,format=raw" -kernel "$root"/boot/vmlinuz-* -initrd "$root"/boot/initrd.img-* \
    -append "root=/dev/vda rw console=ttyS0 loglevel=3 systemd.show_status=false" </dev/null >"$work/console" 2>&1 &
machine=$!
wait "$machine" || fail "the machine ended with $?: $(tail -1 "$work/console")"
machine=
tr -d '\r' <"$work/console" | sed -n '/^tests as /,$p' | grep -v '^\[ *[0-9.]*\]'
[ "$(tr -d '\r' <"$work/console" | grep -c '^tests as .* ended with 0$')" = 2 ] || fail "not all tests passed"
