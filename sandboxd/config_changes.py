"""What of its settings a running daemon can take over, and what takes a new one."""

from __future__ import annotations

from sandboxd.config import Config, ConfigError

# What a daemon is built on: it takes a new one to change it.
WEB_KEYS = ("web", "web_names", "web_token_file", "web_runs")
SERVED_KEYS = ("listen", "keepalive_seconds", "metrics", *WEB_KEYS)
FIXED_KEYS = ("state_dir", "images_dir", *SERVED_KEYS, "fake", "faults", "fault_seed")


def check_changeable(before: Config, after: Config) -> None:
    """Raises ConfigError for the first difference that a running daemon cannot take over."""
    for key in FIXED_KEYS:
        if getattr(before, key) != getattr(after, key):
            raise ConfigError(
                f"{key} cannot change while the daemon runs: change it back, or restart the daemon"
            )
    for name in before.pools.keys() & after.pools:
        old, new = before.pools[name].backend, after.pools[name].backend
        if old != new:
            raise ConfigError(
                f"pools.{name}.backend cannot change from {old!r} to {new!r} while the daemon runs: give the"
                " pool another name, or restart the daemon"
            )
