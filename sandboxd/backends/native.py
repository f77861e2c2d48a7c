"""Where the native program is: the guest of every sandbox and what makes sandboxes, one static binary."""

from __future__ import annotations

from pathlib import Path

from sandboxd.errors import BackendUnavailable

PROGRAM = Path(__file__).parent.parent / "native" / "sandboxd-guest"


def guest_program() -> Path:
    """The binary. Raises BackendUnavailable when it was not built."""
    if not PROGRAM.is_file():
        raise BackendUnavailable(
            f"{PROGRAM} is missing: it is compiled when the package is installed on Linux with a C compiler;"
            " in a checkout run `make guest`"
        )
    return PROGRAM
