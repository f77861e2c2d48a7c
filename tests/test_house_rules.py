"""The house rules that a program can check: sizes, exceptions, settings, words, the root's listing."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.source_tree import ROOT, relative, sources, tree

FILE_LINES = 400
FUNCTION_LINES = 60
FUNCTION_LINES_P90 = 30
PARAMETERS = 6
LINE_CHARACTERS = 110
# Where a broad except may end an error: each writes it down or sends it on, and goes on with the next thing.
MAY_SWALLOW = {
    "sandboxd/insisting.py",
    "sandboxd/lifetime.py",
    "rl/sender_host.py",
    "rl/threads.py",
    "rl/trainer_host.py",
}
# `sandboxd/telemetry/settings.py` reads what OpenTelemetry's specification names;
# `rl/generators/surroundings.py` sets what vLLM alone reads; the two processes' clients pass their own on.
MAY_READ_ENVIRONMENT = {
    "sandboxd/config.py", "sandboxd/telemetry/settings.py",
    "rl/config.py", "rl/generators/surroundings.py", "rl/sender_process.py", "rl/trainer_process.py",
}  # fmt: skip
ROOT_ENTRIES = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "configs",
    "docs", "images", "protos", "pyproject.toml", "requirements", "rl", "sandboxd", "scripts", "tests",
}  # fmt: skip
# Joined, so that this file does not hold what it looks for.
FORBIDDEN_TEXT = {
    "a registry's host": "|".join(
        (r"py" + r"pi\.org", r"pythonh" + r"osted", r"docker" + r"\.io/", r"registry-1\.", r"gh" + r"cr\.io")
    ),
    "a path of one machine": "|".join((r"/wo" + r"rk/", r"/ro" + r"ot/\.", r"/opt/" + r"(pypi|wheels)")),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(*folders: str) -> Iterator[tuple[str, Function]]:
    for path in sources(*folders):
        for node in ast.walk(tree(path)):
            if isinstance(node, Function):
                yield f"{relative(path)}:{node.lineno} {node.name}", node


def _length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_are_short() -> None:
    files = sources("sandboxd", "rl", "tests")
    long = {relative(p): n for p in files if (n := len(p.read_text().splitlines())) > FILE_LINES}
    assert long == {}


def test_functions_are_short() -> None:
    lengths = {name: _length(node) for name, node in _functions("sandboxd", "rl", "tests")}
    assert {name: lines for name, lines in lengths.items() if lines > FUNCTION_LINES} == {}
    ordered = sorted(_length(node) for _, node in _functions("sandboxd", "rl"))
    assert ordered[len(ordered) * 9 // 10] <= FUNCTION_LINES_P90


def test_functions_take_few_parameters() -> None:
    many = {}
    for name, node in _functions("sandboxd", "rl"):
        names = [
            argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        ]
        count = len([each for each in names if each not in ("self", "cls")])
        if count > PARAMETERS:
            many[name] = count
    assert many == {}


def test_broad_excepts_raise() -> None:
    swallowed = {
        relative(path)
        for path in sources("sandboxd", "rl")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _raises(node)
    }
    assert swallowed - MAY_SWALLOW == set()


def _is_broad(node: ast.ExceptHandler) -> bool:
    if node.type is None:
        return True
    names = {each.id for each in ast.walk(node.type) if isinstance(each, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def _raises(node: ast.ExceptHandler) -> bool:
    return any(
        isinstance(each, ast.Raise)
        # A gRPC handler raises by `context.abort`, in this code through `_abort`.
        or (isinstance(each, ast.Call) and "abort" in ast.unparse(each.func))
        for statement in node.body
        for each in ast.walk(statement)
    )


def test_a_second_cancellation_skips_nothing() -> None:
    """In a `finally` it ends the first await: whatever must follow one stands in a `finally` of its own."""
    skipped = [
        f"{relative(path)}:{step.lineno}"
        for path in sources("sandboxd", "rl")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Try)
        for step in node.finalbody[:-1]
        if _waits(step)
    ]
    assert skipped == []


def _waits(step: ast.stmt) -> bool:
    if isinstance(step, ast.Try) and step.finalbody:
        return any(map(_waits, step.finalbody))
    return any(isinstance(each, ast.Await | ast.AsyncFor | ast.AsyncWith) for each in ast.walk(step))


def test_nothing_is_mocked_or_patched() -> None:
    word = re.compile(r"\b(unittest\.mock|MagicMock|AsyncMock|Mock\(|mock\.|monkeypatch\.setattr|patch\()")
    found = [
        f"{relative(path)}:{number}"
        for path in sources("sandboxd", "rl", "tests")
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if word.search(line)
    ]
    assert found == []


def test_only_config_modules_read_the_environment() -> None:
    readers = {
        relative(path)
        for path in sources("sandboxd", "rl")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    assert readers <= MAY_READ_ENVIRONMENT


def test_every_module_says_what_it_is_for() -> None:
    silent = [relative(p) for p in sources("sandboxd", "rl", "tests") if p.read_text() and not _docstring(p)]
    assert silent == []


def _docstring(path: Path) -> str | None:
    return ast.get_docstring(tree(path))


def test_every_module_delays_annotations() -> None:
    marker = "from __future__ import annotations"
    without = [
        relative(path)
        for path in sources("sandboxd", "rl", "tests")
        if marker not in path.read_text() and len(tree(path).body) > 1
    ]
    assert without == []


def test_tests_do_not_sleep_to_synchronise() -> None:
    """`asyncio.sleep(0)` waits for nothing. What another process does may be looked at again and again, in
    a `while` under `asyncio.timeout`; any other sleep is a guess."""
    naps = [
        f"{relative(path)}:{node.lineno}"
        for path in sources("tests")
        for node in sorted(_sleeps(tree(path)) - _bounded_polls(tree(path)), key=lambda call: call.lineno)
    ]
    assert naps == []


def _sleeps(top: ast.AST) -> set[ast.Call]:
    return {
        node
        for node in ast.walk(top)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "anyio.sleep")
        and ast.unparse(node.args[0]) != "0"
    }


def _bounded_polls(top: ast.AST) -> set[ast.Call]:
    return {
        call
        for bound in ast.walk(top)
        if isinstance(bound, ast.AsyncWith) and "timeout(" in ast.unparse(bound.items[0].context_expr)
        for loop in ast.walk(bound)
        if isinstance(loop, ast.While)
        for call in _sleeps(loop)
    }


def _tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_root_holds_what_the_design_lists() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in _tracked()} <= ROOT_ENTRIES


@pytest.mark.parametrize("what", FORBIDDEN_TEXT)
def test_the_text_speaks_of_the_project_alone(what: str) -> None:
    pattern = re.compile(FORBIDDEN_TEXT[what])
    found = [
        f"{relative(path)}:{number}"
        for path in _tracked()
        if path != Path(__file__) and path.suffix not in (".png", ".gguf")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_generated_code_is_current() -> None:
    done = subprocess.run(
        ["scripts/protos.sh", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_native_code_is_short() -> None:
    """Files, functions (from a line that begins one to the brace at its margin), parameters and lines."""
    functions = 0
    for path in sorted((ROOT / "sandboxd" / "native").glob("*.[ch]")):
        lines = path.read_text().splitlines()
        assert len(lines) <= FILE_LINES, relative(path)
        assert [n for n, line in enumerate(lines, 1) if len(line) > LINE_CHARACTERS] == [], relative(path)
        assert lines[0].startswith("/* "), f"{relative(path)} does not say what it is for"
        for name, length, parameters in _native_functions(lines):
            functions += 1
            assert (length <= FUNCTION_LINES, parameters <= PARAMETERS) == (True, True), (
                f"{relative(path)}: {name}"
            )
    assert functions, "none was found: how is one told?"


def _native_functions(lines: list[str]) -> Iterator[tuple[str, int, int]]:
    """Name, lines and parameters of each definition."""
    for begin, line in enumerate(lines):
        found = re.match(r"[a-z][\w *]*?\b(\w+)\(", line)
        if found is None:
            continue
        head = "".join(lines[begin : begin + 4]).partition("{")[0]
        if ";" not in head and ")" in head:
            yield found[1], lines.index("}", begin) - begin + 1, head.count(",") + 1
