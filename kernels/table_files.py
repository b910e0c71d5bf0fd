"""Where tables lie, and reading one: each file is parsed once, until it changes.

Places, in the order in which they are looked at: the path that the caller gives; KERNELTUNE_TABLES, a path list of
files or folders; the user's folder, ~/.config/kerneltune/tables; what is shipped in kerneltune/results/*/tables.
"""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneltune.kernels.table_format import MAX_BYTES, Table, TableError, parse_table

MAX_REMEMBERED = 4096  # files


@dataclass(frozen=True)
class Source:
    """One place in the lookup order."""

    name: str  # "argument", "KERNELTUNE_TABLES", "user", "shipped"
    files: tuple[str, ...]
    named: frozenset[str] = frozenset()  # files that the user named one by one: what is wrong with them is said


def sources(tables: Sequence[str | os.PathLike[str]] | None = None, *, only: bool = False) -> Iterator[Source]:
    """The places where tables are looked for, in order, with the files that lie there now."""
    if tables is not None:
        yield _listed("argument", [os.fspath(path) for path in tables])
    if only:
        return
    named = os.environ.get("KERNELTUNE_TABLES")
    if named:
        yield _listed("KERNELTUNE_TABLES", [path for path in named.split(os.pathsep) if path])
    yield Source("user", tuple(_json_files(user_folder())))
    yield Source("shipped", _shipped())


def user_folder() -> str:
    """Where a search installs its tables: the folder that platformdirs gives for user configuration on Linux."""
    root = os.environ.get("XDG_CONFIG_HOME", "").strip() or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(root, "kerneltune", "tables")


def read_table(path: str | os.PathLike[str]) -> Table:
    """Read and check one file; the result is kept until the file changes.

    Raises:
        TableError: it is not a sound table.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        found = os.stat(name)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise TableError("not a regular file")
        signature = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = _files.get(name)
        if known is None or known[0] != signature:
            result: Table | TableError
            try:
                result = parse_table(_read_bytes(name), name)
            except TableError as error:
                result = error
            if len(_files) >= MAX_REMEMBERED:
                _files.clear()
            known = _files[name] = (signature, result)
    except ValueError as error:  # a TableError, or a path that holds a NUL
        raise TableError(str(error)) from None
    if isinstance(known[1], TableError):
        raise TableError(str(known[1]))
    return known[1]


_files: dict[str, tuple[Any, Table | TableError]] = {}


def _listed(name: str, paths: list[str]) -> Source:
    """Files as named; of a folder the tables in it, and in its `tables` (the --out folder of a search)."""
    files: list[str] = []
    for path in paths:
        if os.path.isdir(path):
            files += [*_json_files(path), *_json_files(os.path.join(path, "tables"))]
        else:
            files.append(path)
    return Source(name, tuple(files), frozenset(paths))


def _json_files(folder: str) -> list[str]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [os.path.join(folder, name) for name in names if name.endswith(".json") and not name.startswith(".")]


@functools.cache
def _shipped() -> tuple[str, ...]:
    """The tables of the installed package: kerneltune/results, beside kerneltune/kernels (a folder or a link)."""
    results = Path(__file__).parent.parent / "results"
    return tuple(str(path) for path in sorted(results.glob("*/tables/*.json")))


def _read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(MAX_BYTES + 1)
