#!/usr/bin/env bash
# Builds the images that the tests use, and with "toolbox" or "software" those that pools use.
#
#   images/build.sh            sandboxd/test-python and sandboxd/test-busybox
#   images/build.sh toolbox    sandboxd/python, from images/python/Dockerfile
#   images/build.sh software   sandboxd/software, from images/software/Dockerfile
#
# No registry is needed: the base is laid out by mmdebstrap from this host's own Debian or Ubuntu packages.
# What is there already is kept; REBUILD=1 makes it anew.
set -euo pipefail
cd "$(dirname "$0")"

fail() { echo "images: $*" >&2; exit 2; }
present() { [ -z "${REBUILD:-}" ] && docker image inspect "$1" >/dev/null 2>&1; }
need() { command -v "$1" >/dev/null || fail "$1 is missing; install it (apt-get install $2) and run this again"; }

docker info >/dev/null 2>&1 || fail "no Docker Engine answers; start it (systemctl start docker) or run as its group"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python_image() {
    need mmdebstrap mmdebstrap
    echo "images: laying out sandboxd/test-python (half a minute)"
    # shellcheck source=/dev/null
    suite=${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
    mmdebstrap --quiet --variant=minbase --include=python3 \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$scratch/python.tar" || fail "mmdebstrap $suite failed"
    docker import "$scratch/python.tar" sandboxd/test-python:latest >/dev/null
}

software_base() {
    need mmdebstrap mmdebstrap
    local packages
    packages=$(sed -n 's/^ARG PACKAGES="\(.*\)"$/\1/p' software/Dockerfile | tr ' ' ',')
    echo "images: laying out the base of sandboxd/software (two minutes)"
    # shellcheck source=/dev/null
    suite=${SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")}
    mmdebstrap --quiet --variant=minbase --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$scratch/software.tar" || fail "mmdebstrap $suite failed"
    docker import "$scratch/software.tar" sandboxd/software-base:latest >/dev/null
}

busybox_image() {
    need busybox busybox-static
    echo "images: laying out sandboxd/test-busybox"
    mkdir -p "$scratch/busybox"/{bin,etc,proc,dev,tmp}
    cp "$(command -v busybox)" "$scratch/busybox/bin/busybox"
    local applet
    for applet in $(busybox --list); do
        [ "$applet" = busybox ] || ln -s busybox "$scratch/busybox/bin/$applet"
    done
    tar -C "$scratch/busybox" -c . | docker import - sandboxd/test-busybox:latest >/dev/null
    # A dynamically linked busybox finds no libraries in an image of its own.
    docker run --rm --network none sandboxd/test-busybox:latest /bin/true ||
        fail "busybox does not run alone; install its static build (apt-get install busybox-static)"
}

case "${1:-test}" in
    test)
        present sandboxd/test-python:latest || python_image
        present sandboxd/test-busybox:latest || busybox_image
        ;;
    toolbox)
        base=${BASE:-}
        if [ -z "$base" ]; then
            present sandboxd/test-python:latest || python_image
            base=sandboxd/test-python:latest
        fi
        docker build --quiet --build-arg "BASE=$base" --tag sandboxd/python:latest python >/dev/null
        ;;
    software)
        base=${BASE:-}
        if [ -z "$base" ]; then
            base=sandboxd/software-base:latest
            present "$base" || software_base
        fi
        docker build --quiet --build-arg "BASE=$base" --tag sandboxd/software:latest software >/dev/null
        ;;
    *) fail "unknown image set '$1'; known: test, toolbox, software" ;;
esac
echo "images: ready"
