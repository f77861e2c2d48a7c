#!/usr/bin/env bash
# Generates sandboxd/v1 from protos/. With --check, changes nothing and fails when the two differ.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT

# google/api and google/rpc come with the package googleapis-common-protos.
common=$("$python" -c 'import google.api, pathlib; print(pathlib.Path(list(google.api.__path__)[0]).parents[1])')
"$python" -m grpc_tools.protoc -Iprotos -I"$common" \
    --python_out="$target" --pyi_out="$target" --grpc_python_out="$target" protos/sandboxd/v1/*.proto
# A file without services gets an empty stub module; nobody imports it.
for stub in "$target"/sandboxd/v1/*_pb2_grpc.py; do
    grep -q 'class .*Stub' "$stub" || rm "$stub"
done
touch "$target/sandboxd/v1/__init__.py"

if [ "${1:-}" = --check ]; then
    diff -r --exclude=__pycache__ "$target/sandboxd/v1" sandboxd/v1 ||
        { echo "sandboxd/v1 is not what protos/ generates: run 'make protos' and commit the result" >&2; exit 1; }
else
    cp "$target"/sandboxd/v1/* sandboxd/v1/
fi
