"""`python -m rl`: loads the command line and runs it."""

from __future__ import annotations

import os
import sys

from sandboxd import beginning


def main() -> int:
    """Returns the exit code."""
    beginning.quiet()
    from rl.cli import main as run

    return run()


if __name__ == "__main__":
    code = main()
    # Not sys.exit: taking the interpreter apart with torch and vLLM in it has lasted 8 s, and prints what
    # their destructors stumble over. All that needed closing has been closed, and all processes ended.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
