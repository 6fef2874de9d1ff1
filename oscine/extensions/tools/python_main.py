"""Runs the code on standard input as Jupyter would run a cell: the value of a last expression is shown.

Runs inside the jail, as text on a command line; see python_jail.py. Tracebacks show the code alone.
"""

import ast
import linecache
import sys
import traceback
import types

FILE = "main.py"


def run(source: str) -> None:
    linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    tree = ast.parse(source, FILE)
    shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    exec(compile(tree, FILE, "exec"), module.__dict__)
    exec(compile(ast.Interactive(shown), FILE, "single"), module.__dict__)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        run(sys.stdin.read())
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != FILE:
            trace = trace.tb_next
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)
