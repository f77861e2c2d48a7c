"""The `sandboxd` command, also `python -m sandboxd`."""

from __future__ import annotations

import sys

from sandboxd import beginning


def main() -> int:
    """Loads the command line and runs it. Returns the exit code."""
    beginning.quiet()
    from sandboxd.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
