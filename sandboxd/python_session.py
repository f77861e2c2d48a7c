"""The program of `Box.python`: runs pieces of code in one namespace, in a sandbox of any Python from 3.8.

It is handed to the sandbox's own interpreter as text, so it may import nothing but the standard library.
A piece comes as a line `NUMBER LENGTH` and its bytes; its end is told as sandboxd.sessions expects.
"""

from __future__ import annotations

import ast
import code
import linecache
import os
import signal
import sys
import types

INTERRUPTED = 130


class Interpreter(code.InteractiveInterpreter):
    """Python's own, which shows what code raises; `status` is the exit code of the last piece."""

    def __init__(self, main: types.ModuleType) -> None:
        super().__init__(main.__dict__)
        self.status = 0

    def run(self, source: str, name: str) -> None:
        """Runs a piece, and shows the value of a last expression as the prompt would."""
        # For tracebacks, which show the lines they speak of.
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        self.status = 0
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            tree = ast.parse(source, name)
            last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
            self.runcode(compile(tree, name, "exec"))
            if last and not self.status:
                self.runcode(compile(ast.Interactive(last), name, "single"))
        except (SyntaxError, ValueError, OverflowError):
            self.status = 1
            self.showsyntaxerror(name)
        except SystemExit as end:
            self.status = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def showtraceback(self) -> None:
        self.status = INTERRUPTED if sys.exc_info()[0] is KeyboardInterrupt else 1
        super().showtraceback()


def serve() -> None:
    """Until the input ends. Code sees an empty standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # By other numbers, for code may redirect 1 and 2 for good.
    stdout, stderr = os.dup(1), os.dup(2)
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    sys.argv = [""]
    interpreter = Interpreter(main)
    count = 0
    while True:
        header = source.readline().split()
        if not header:
            return
        count += 1
        text = source.read(int(header[1])).decode("utf-8", "replace")
        try:
            interpreter.run(text, f"<input {count}>")
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:
            interpreter.status = INTERRUPTED
        except (OSError, ValueError, AttributeError):
            pass  # The code closed or replaced what would have been flushed.
        os.write(stdout, b"\x1e%s:%d\x1e" % (header[0], interpreter.status))
        os.write(stderr, b"\x1e%s\x1e" % header[0])


if __name__ == "__main__":
    serve()
