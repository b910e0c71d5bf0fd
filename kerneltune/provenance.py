"""What a measurement is valid for: the hash of the kernel's code, comments and docstrings left out."""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Tunable


def kernel_hash(tunable: Tunable) -> str:
    """12 hex digits over the code of the tunable's `sources`, which lie beside the module of its class."""
    folder = Path(str(sys.modules[type(tunable).__module__].__file__)).resolve().parent
    digest = hashlib.sha256()
    for name in tunable.sources:
        digest.update(name.encode())
        digest.update(code_only(folder.joinpath(name).read_text()).encode())
    return digest.hexdigest()[:12]


def code_only(source: str) -> str:
    """A module's text without comments, docstrings and blank lines: the same under every version of Python.

    (Text that `ast.unparse` makes is not: 3.12 writes f-strings in another way than 3.11.)
    """
    lines = [list(line) for line in source.splitlines()]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            del lines[row - 1][column:]
    for first, last in _docstrings(ast.parse(source)):
        for row in range(first, last + 1):
            lines[row - 1] = []
    kept = ("".join(line).rstrip() for line in lines)
    return "\n".join(line for line in kept if line)


def _docstrings(tree: ast.Module) -> list[tuple[int, int]]:
    """First and last line of each docstring."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            statement = node.body[0]
            found.append((statement.lineno, statement.end_lineno or statement.lineno))
    return found
