#!/usr/bin/env bash
# The loop beside TRL's GRPOTrainer: trains SETTINGS with both, one after the other, and compares the time that each
# takes to the same held-out solve rate. Installs TRL into a virtual environment of its own, .venv-trl, which sees the
# packages of .venv. What is finished is not made again.
#   scripts/trl.sh SETTINGS [--trl-steps N] [--seed N] [options of `python -m rl versus`]
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "trl: $*" >&2; exit 2; }

[ $# -ge 1 ] && [ -f "$1" ] || fail "give a file of settings, such as configs/one_turn.toml"
settings=$1
shift
steps=5
seed=
while [ $# -gt 0 ]; do
    case $1 in
        --trl-steps) steps=${2:?trl: --trl-steps needs a number} ;;
        --seed) seed=${2:?trl: --seed needs a number} ;;
        *) break ;;
    esac
    shift 2
done
[ -x .venv/bin/python ] || fail "there is no .venv; run: make .venv"
export PYTHONPATH=$PWD

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }

if [ ! -f .venv-trl/.installed ] || [ requirements/trl.lock -nt .venv-trl/.installed ]; then
    echo "trl: installing TRL into .venv-trl (under a minute, 300 MB)"
    .venv/bin/python -m venv --without-pip .venv-trl
    # A path of its own, and not --system-site-packages, which would name the system's packages and not .venv's.
    packages .venv/bin/python >"$(packages .venv-trl/bin/python)/loop.pth"
    .venv-trl/bin/python -m pip --disable-pip-version-check install -qq --no-deps -r requirements/trl.lock
    touch .venv-trl/.installed
fi

read -r seed runs < <(.venv/bin/python -c 'import sys
from pathlib import Path
from rl.config import load
config = load(Path(sys.argv[1]), {})
print(sys.argv[2] or config.seed, config.directory)' "$settings" "$seed")
[ -n "${runs:-}" ] || fail "$settings cannot be read"
run=$runs/trl-$seed

if [ ! -f "$run/summary.json" ]; then
    echo "trl: training $run, $steps steps"
    # What the loop's trainer gets from its surroundings, too.
    env $(.venv/bin/python -c 'from rl.processes import THREADS
from rl.trainer_process import ALLOCATOR
print(*(f"{key}={value}" for key, value in {**THREADS, "GLIBC_TUNABLES": ALLOCATOR}.items()))') \
        TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore \
        .venv-trl/bin/python scripts/trl_train.py "$settings" --runs-dir "$runs" --name "trl-$seed" \
        --seed "$seed" --steps "$steps"
fi
exec .venv/bin/python -m rl versus "$settings" --seed "$seed" --beside "$run" "$@"
