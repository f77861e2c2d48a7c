"""Compiles the guest when the package is built or installed: what pyproject.toml names as `cmdclass`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SCRIPT = "scripts/guest.sh"
# What the script ends with when something is missing on this machine.
MISSING = 2


class BuildWithGuest(build_py):
    """Where it cannot be compiled the package is built without: clients need none, daemons tell what to do.
    An error in the sources fails the build."""

    def run(self) -> None:
        """Before what is there is looked up."""
        if sys.platform == "linux":
            done = subprocess.run(["bash", SCRIPT], check=False)
            if done.returncode == MISSING:
                self.warn("built without the guest: this installation runs no sandboxes of its own")
            elif done.returncode:
                raise SystemExit(f"{SCRIPT} ended with {done.returncode}")
        super().run()

    def get_source_files(self) -> list[str]:
        """What a source distribution must hold to be built."""
        native = sorted(map(str, Path("sandboxd/native").glob("*.[ch]")))
        return [*super().get_source_files(), SCRIPT, "scripts/guest_build.py", *native]


class WheelWithGuest(bdist_wheel):
    """A wheel for any Python of one kind of machine."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = sys.platform != "linux"

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
