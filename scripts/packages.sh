# Installs Debian's packages. Sourced by scripts that have a `fail`, which ends them with one line.

apt_install() { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null; }

# need_packages WHY PACKAGE...: root gets them installed, others are told the command.
need_packages() {
    local why=$1
    shift
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "$why; run: sudo apt-get install $*"
    echo "$(basename "$0" .sh): $why; installing $* (up to a minute)"
    { apt-get update -qq >/dev/null && apt_install "$@"; } 2>/dev/null ||
        fail "apt-get could not install $*: run it by hand to see why"
}
