"""What a measurement is valid for: the hash of the kernel's code, comments and docstrings left out."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Tunable


def kernel_hash(tunable: Tunable) -> str:
    """12 hex digits over the syntax trees of the tunable's `sources`, which lie beside the module of its class."""
    folder = Path(str(sys.modules[type(tunable).__module__].__file__)).resolve().parent
    digest = hashlib.sha256()
    for name in tunable.sources:
        digest.update(name.encode())
        digest.update(_normalised((folder / name).read_text()).encode())
    return digest.hexdigest()[:12]


def _normalised(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
            and isinstance(body[0].value.value, str)
        ):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)
