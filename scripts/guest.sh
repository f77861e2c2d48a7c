#!/usr/bin/env bash
# Compiles sandboxd/native/*.c to sandboxd/native/sandboxd-guest, one static program without dependencies.
# --sanitize makes sandboxd-guest-sanitized instead, which ends at the first memory error or undefined behaviour.
# Ends with 2 and one line where something is missing on this machine.
set -euo pipefail
cd "$(dirname "$0")/../sandboxd/native"

missing() { echo "guest: $*" >&2; exit 2; }

cc=${CC:-cc}
flags=(-std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fno-strict-aliasing)
case "${1:-}" in
    "") out=sandboxd-guest flags+=(-O2 -static -s -fstack-protector-strong) ;;
    --sanitize) out=sandboxd-guest-sanitized flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all) ;;
    *) missing "unknown option $1; there is --sanitize" ;;
esac
command -v "$cc" >/dev/null || missing "no C compiler ($cc); install one (Debian: apt-get install gcc libc6-dev) or set CC"
echo 'int main(void) { return 0; }' | "$cc" "${flags[@]}" -x c -o /dev/null - 2>/dev/null ||
    missing "$cc cannot link with ${flags[*]}; install what it lacks (the static C library: libc6-dev, glibc-static)"

# Another build may run at the same time, and a program that runs cannot be written to.
trap 'rm -f "$out.$$"' EXIT
"$cc" "${flags[@]}" -o "$out.$$" ./*.c
chmod 755 "$out.$$" # A container's user runs it.
mv "$out.$$" "$out"
