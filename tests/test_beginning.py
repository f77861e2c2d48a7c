"""Ctrl-C while a command loads its modules, and what loading the package costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sandboxd

from .source_tree import ROOT

# Presses Ctrl-C as the first argument is about to be imported, and not a moment sooner or later.
PRESSES = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
package, when = sys.argv[1:3]
class Presses:
    def find_spec(self, name, *_):
        if name == when:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
sys.argv[1:] = ["--help"]
runpy.run_module(package, run_name="__main__")
"""


def ran(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("package", "when"),
    [("sandboxd", "grpc"), ("sandboxd", "sandboxd.examples"), ("rl", "rich"), ("rl", "rl.versus")],
)
def test_ctrl_c_while_a_command_is_loaded_is_silent(package: str, when: str) -> None:
    done = ran(PRESSES, package, when)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_package_loads_what_it_is_asked_for() -> None:
    assert all(hasattr(sandboxd, name) for name in sandboxd.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Cliant'"):
        getattr(sandboxd, "Cliant")  # noqa: B009 - the name is wrong on purpose
    light = ran("import sandboxd, sys; sandboxd.errors; sys.exit('grpc' in sys.modules)")
    assert (light.returncode, light.stderr) == (0, "")
