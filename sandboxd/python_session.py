"""The program of `Box.python`: runs pieces of code in one namespace, in a sandbox of any Python from 3.8.

It is handed to the sandbox's own interpreter as text, so it may import nothing but the standard library.
A piece comes as a line `NUMBER LENGTH` and its bytes; its end is told as sandboxd.sessions expects.
"""

import ast
import linecache
import os
import signal
import sys
import traceback
import types

INTERRUPTED = 130


def run(code: str, scope: "dict[str, object]", name: str) -> int:
    """Runs a piece and shows the value of a last expression; returns its exit code."""
    # For tracebacks, which show the lines they speak of.
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        tree = ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), scope)  # noqa: S102 - what it is for
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), scope))  # noqa: S307
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 - whatever the code raises is its result
        # Without this function's own frame.
        inner = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(type(error), error, inner)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def serve() -> None:
    """Until the input ends. Code sees an empty standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # By other numbers, for code may redirect 1 and 2 for good.
    stdout, stderr = os.dup(1), os.dup(2)
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [""]
    count = 0
    while True:
        header = source.readline().split()
        if not header:
            return
        count += 1
        code = source.read(int(header[1])).decode("utf-8", "replace")
        try:
            status = run(code, main.__dict__, f"<input {count}>")
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:
            status = INTERRUPTED
        except (OSError, ValueError, AttributeError):
            pass  # The code closed or replaced what would have been flushed.
        os.write(stdout, b"\x1e%s:%d\x1e" % (header[0], status))
        os.write(stderr, b"\x1e%s\x1e" % header[0])


if __name__ == "__main__":
    serve()
