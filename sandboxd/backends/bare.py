"""Programs of ours that run in a bare interpreter, without the packages that the daemon needs."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent

# Stands for the packages, whose __init__ would load what such a program must not carry, gRPC above all.
BOOTSTRAP = """
import sys, types
root, name = sys.argv[1:3]
for package in ("sandboxd", "sandboxd.backends", "sandboxd.images"):
    module = sys.modules[package] = types.ModuleType(package)
    module.__path__ = ["/".join([root, *package.split(".")[1:]])]
__import__(name)
sys.modules[name].main()
"""


def command(python: str, module: str, *arguments: str) -> list[str]:
    """What runs `main()` of the module; `sys.argv[3:]` are the arguments."""
    return [python, "-I", "-S", "-c", BOOTSTRAP, str(PACKAGE), module, *arguments]
