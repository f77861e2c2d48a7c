"""What the house-rule tests know of the source tree: its files, their syntax trees and their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ROOT / "sandboxd" / "v1"


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """The Python files under these folders, generated ones left out; some in each, or a rule would hold for
    none.
    """
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert all(any((ROOT / folder) in path.parents for path in found) for folder in folders), folders
    return tuple(path for path in found if GENERATED not in path.parents)


@cache
def tree(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


def relative(path: Path) -> str:
    """The path as messages and rules name it."""
    return path.relative_to(ROOT).as_posix()


def module(path: Path) -> str:
    """The file's module name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, *, anywhere: bool = True) -> Iterator[str]:
    """Every module that the file imports: `from a import b` counts as `a` and as `a.b`.

    With `anywhere` False, only what is imported when the file itself is, for real.
    """
    for node in ast.walk(tree(path)) if anywhere else _at_import(tree(path).body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level, f"{relative(path)}:{node.lineno} imports relatively"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _at_import(getattr(node, field, []))
