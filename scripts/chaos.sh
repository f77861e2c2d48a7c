#!/usr/bin/env bash
# One run of `sandboxd bench chaos` for each seed, a line for each; ends with 1 when one was not clean.
set -uo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- $(seq 20)
results=$(mktemp -d -t sandboxd-chaos.XXXXXX)
trap 'rm -rf "$results"' EXIT
code=0
for seed in "$@"; do
    .venv/bin/python -m sandboxd bench chaos --seed "$seed" --json "$results/$seed.json" >"$results/$seed.txt" 2>&1 ||
        { code=1; cat "$results/$seed.txt"; }
    [ ! -e "$results/$seed.json" ] || .venv/bin/python - "$results/$seed.json" <<'END'
import json, sys
run = json.load(open(sys.argv[1]))
chaos = run["chaos"]
outcomes = ", ".join(f"{count} {outcome}" for outcome, count in chaos["outcomes"].items())
leaked = sum((run["leaked"] or {}).values())
print(f"seed {chaos['seed']}: {run['wall_s']:.0f} s, {outcomes}; {run['failed']} wrong, {leaked} leaked,"
      f" whole again after {chaos['recovery_s']:.1f} s", flush=True)
END
done
exit "$code"
