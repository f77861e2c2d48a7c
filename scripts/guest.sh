#!/usr/bin/env bash
# Compiles sandboxd/native/*.c to sandboxd/native/sandboxd-guest, one static program without dependencies.
# --sanitize makes sandboxd-guest-sanitized instead, which ends at the first memory error or undefined behaviour.
set -euo pipefail
cd "$(dirname "$0")/../sandboxd/native"

cc=${CC:-cc}
command -v "$cc" >/dev/null ||
    { echo "guest: no C compiler ($cc); install one (Debian: apt-get install gcc libc6-dev) or set CC" >&2; exit 2; }

flags=(-std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fno-strict-aliasing)
case "${1:-}" in
    "") out=sandboxd-guest flags+=(-O2 -static -s -fstack-protector-strong) ;;
    --sanitize) out=sandboxd-guest-sanitized flags+=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all) ;;
    *) echo "guest: unknown option $1; there is --sanitize" >&2; exit 2 ;;
esac
# Another build may run at the same time, and a program that runs cannot be written to.
"$cc" "${flags[@]}" -o "$out.$$" ./*.c
chmod 755 "$out.$$" # A container's user runs it.
mv "$out.$$" "$out"
