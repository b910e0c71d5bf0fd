"""The hash of a kernel variant's source: of its launch functions and all that they call, comments and docstrings aside.

Decided from the files alone, without a GPU and without importing what is hashed. A constant, a default or a line of
code counts; a comment, a docstring or a blank line does not, nor does code that the variant never reaches. What lies
outside the kernel's own top-level package (torch, triton) is not followed: its versions are compared on their own.

Limits: a name is followed where it is written as `name` or `module.name`, not where it is made at run time (getattr).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Variant -> the functions that make its launches, "module:name". The first variant is that of a config that names none.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "mla-decode": {
        "split_kv": (
            "kerneltune.kernels.mla_decode.triton_split_kv:split_kv_call",
            "kerneltune.kernels.mla_decode.combine:combine_call",
        ),
        "hopper": (
            "kerneltune.kernels.mla_decode.hopper:hopper_call",
            "kerneltune.kernels.mla_decode.combine_pieces:combine_pieces_call",
        ),
    },
    "moe": {"grouped_gemm": ("kerneltune.kernels.moe.launch:make_calls",)},
}


def variant_of(kernel: str, config: Mapping[str, object]) -> str:
    """The variant that a config launches: what it names, else the first of the kernel."""
    named = config.get("variant")
    return named if isinstance(named, str) else next(iter(VARIANTS[kernel]))


@functools.cache
def variant_hash(kernel: str, variant: str) -> str | None:
    """12 hex digits for the source as it lies here; None for a variant that this version does not have."""
    roots = VARIANTS.get(kernel, {}).get(variant)
    return None if roots is None else source_hash(roots)


def source_hash(roots: tuple[str, ...]) -> str:
    """12 hex digits over the code that `roots` ("module:name") reach, in an order that no edit elsewhere moves.

    Raises:
        ValueError: a root is not there.
    """
    digest = hashlib.sha256()
    for place, code in sorted(reached(roots).items()):
        digest.update(f"{place}\n{code}\n".encode())
    return digest.hexdigest()[:12]


def reached(roots: tuple[str, ...]) -> dict[str, str]:
    """The code of each definition ("module:name") that `roots` reach, themselves included.

    Raises:
        ValueError: a root is not there.
    """
    found: dict[tuple[str, str], str] = {}
    todo = [_split(root) for root in roots]
    for module, name in todo:
        if name not in _module(module).definitions:
            raise ValueError(f"{module} defines no {name}")
    while todo:
        place = todo.pop()
        if place in found:
            continue
        definition = _module(place[0]).definitions[place[1]]
        found[place] = definition.code
        todo += definition.uses
    return {f"{module}:{name}": code for (module, name), code in found.items()}


@dataclass(frozen=True)
class _Definition:
    """A function, class or assignment at the top of a module."""

    code: str
    uses: tuple[tuple[str, str], ...]  # (module, name) of the same package


@dataclass(frozen=True)
class _Module:
    definitions: dict[str, _Definition]


def _split(root: str) -> tuple[str, str]:
    module, _, name = root.partition(":")
    return module, name


@functools.cache
def _module(name: str) -> _Module:
    path = _path(name)
    if path is None:
        raise ValueError(f"no module {name}")
    text = path.read_text()
    tree = ast.parse(text)
    lines = code_lines(text, tree)
    package = name.partition(".")[0]
    imported, modules = _imports(tree, package)
    nodes = {defined: node for node in tree.body for defined in _defined(node)}
    definitions = {}
    for defined, node in nodes.items():
        uses: dict[tuple[str, str], None] = {}
        for place in _names(node):
            first, _, rest = place.partition(".")
            if first in nodes and first != defined:
                uses[name, first] = None
            elif first in imported:
                uses[imported[first]] = None
            elif first in modules and rest:
                uses[modules[first], rest.partition(".")[0]] = None
        kept = tuple(place for place in uses if place[1] in _defined_in(place[0]))
        definitions[defined] = _Definition(_text(node, lines), kept)
    return _Module(definitions)


@functools.cache
def _defined_in(module: str) -> frozenset[str]:
    path = _path(module)
    if path is None:
        return frozenset()
    return frozenset(name for node in ast.parse(path.read_text()).body for name in _defined(node))


@functools.cache
def _path(module: str) -> Path | None:
    """The file of a module, by the place of its top-level package: finding a submodule would import its parents."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        for end in (".py", "/__init__.py"):
            path = Path(folder, *inner[:-1], inner[-1] + end)
            if path.is_file():
                return path
    return None


def _imports(tree: ast.Module, package: str) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Names of this package as the module knows them: local name -> (module, name), and local name -> module."""
    names: dict[str, tuple[str, str]] = {}
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
            for alias in node.names:
                local, whole = alias.asname or alias.name, f"{node.module}.{alias.name}"
                if alias.name not in _defined_in(node.module) and _path(whole) is not None:
                    modules[local] = whole
                else:
                    names[local] = node.module, alias.name
    return names, modules


def _defined(node: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    return []


def _names(node: ast.AST) -> Iterator[str]:
    """Every `name` and `name.attribute` that the code of a definition holds, annotations of functions aside."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name):
                yield f"{child.value.id}.{child.attr}"
            elif isinstance(child, ast.Name):
                yield child.id
            elif isinstance(child, ast.AST):
                yield from _names(child)


def _text(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
    return "\n".join(line for line in lines[first - 1 : node.end_lineno] if line)


def code_lines(source: str, tree: ast.Module) -> list[str]:
    """The lines of a module, those of comments and docstrings emptied: the same under every version of Python.

    (Text that `ast.unparse` makes is not: 3.12 writes f-strings in another way than 3.11.)
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is None:
                continue
            statement = node.body[0]
            for row in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1):
                lines[row - 1] = ""
    return [line.rstrip() for line in lines]
