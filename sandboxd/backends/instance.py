"""What tells one daemon's sandboxes from another's on a host: a name drawn from its state directory."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def instance(state_dir: Path) -> str:
    """Twelve hexadecimal digits, the same for every daemon on this directory."""
    return hashlib.sha256(os.fsencode(state_dir.resolve())).hexdigest()[:12]
