"""`python -m sandboxd` and `sandboxd`: see `cli`."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Runs the command line and returns its exit code."""
    # Before gRPC is loaded: nothing here forks without an exec, for which it would prepare, and warn.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    from sandboxd import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
