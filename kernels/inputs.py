"""Inputs as they were served: which experts tokens chose, or how long sequences were, read from a file.

A workload names the file once, `routing=ids.json`; completed, its value is `ids.json@1a2b3c4d`: the path and eight hex
digits of the content's SHA-256. A changed file is thus another workload, and nothing measured on the old one is taken
for it. The completed value is only a name until inputs are drawn: a replay needs no file.

Formats: .json (lists of whole numbers, or an object that holds them under their name), .npy, .pt (a tensor, or a dict
that holds it; loaded with `weights_only=True`). Nothing in a file is ever run.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kerneltune.kernels.table_format import split_recorded

FORMATS = (".json", ".npy", ".pt")
REMEMBERED_FILES = 4  # parsed files that are kept: a ladder draws from one file again and again

Check = Callable[[torch.Tensor], None]  # raises ValueError: what is wrong with the numbers, and what was expected


def complete(key: str, value: object, classes: Sequence[str], name: str, check: Check) -> str:
    """The value of an input class as a completed workload holds it: one of `classes`, or `<path>@<hash8>`.

    Args:
        key: the workload key, "routing" or "lengths", for messages.
        name: what a file holds, "topk_ids" or "lengths": its name in a file that is an object.
        check: is called with the file's numbers, int64 on the CPU.

    Raises:
        ValueError: neither a class nor a file, or a file with other content than expected.
    """
    if isinstance(value, str):
        if value in classes or split_recorded(value):
            return value
        path = os.path.expanduser(value)
        if os.path.isfile(path):
            return f"{path}@{_read(key, path, name, check)[1]}"
    words = f"{', '.join(classes)} or a file of recorded {name} ({', '.join(FORMATS)})"
    raise ValueError(f"{key}={value}: no such class and no such file, expected {words}")


def recorded(key: str, value: str, name: str, check: Check) -> torch.Tensor:
    """The numbers behind a completed value `<path>@<hash8>`, int64 on the CPU; not to be written to.

    Raises:
        ValueError: the file is not there, or its content is no longer the one that was named.
    """
    named = split_recorded(value)
    if named is None or not os.path.isfile(named[0]):
        raise ValueError(f"{key}={value}: the recorded {name} are needed, and there is no such file here")
    numbers, digest = _read(key, named[0], name, check)
    if digest != named[1]:
        raise ValueError(f"{key}={value}: the file has changed, its content is now @{digest}")
    return numbers


def window(numbers: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """`count` consecutive rows from a random one on, from the end on to the start: neighbours in service stay so."""
    start = int(torch.randint(len(numbers), (1,), generator=torch.Generator().manual_seed(seed)))
    return numbers[(start + torch.arange(count)) % len(numbers)]


def _read(key: str, path: str, name: str, check: Check) -> tuple[torch.Tensor, str]:
    """The checked numbers of a file, and its hash; every fault names the file."""
    try:
        found = os.stat(path)
        numbers, digest = _load(path, name, (found.st_ino, found.st_mtime_ns, found.st_size))
        check(numbers)
    except OSError as error:
        raise ValueError(f"{key}={path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{key}={path}: {error}") from None
    return numbers, digest


@functools.lru_cache(maxsize=REMEMBERED_FILES)
def _load(path: str, name: str, signature: tuple[int, int, int]) -> tuple[torch.Tensor, str]:
    """int64 numbers and hash8 of one state of a file; `signature` changes with the file."""
    with open(path, "rb") as file:
        data = file.read()
    return _numbers(_parse(data, os.path.splitext(path)[1].lower()), name), hashlib.sha256(data).hexdigest()[:8]


def _parse(data: bytes, suffix: str) -> Any:
    if suffix not in FORMATS:
        raise ValueError(f"a file of format {suffix or '(none)'}: expected {', '.join(FORMATS)}")
    try:
        if suffix == ".json":
            return json.loads(data)
        if suffix == ".pt":
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        import numpy

        return numpy.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # a file from outside: whatever reading it can raise
        said = " ".join(str(error).split())
        raise ValueError(f"not a sound {suffix} file ({type(error).__name__}: {said:.120})") from None


def _numbers(found: Any, name: str) -> torch.Tensor:
    """int64 of whatever a file held."""
    if isinstance(found, dict):
        if name not in found:
            raise ValueError(f"expected {name} in it, found {', '.join(map(str, found))[:80] or 'nothing'}")
        found = found[name]
    if isinstance(found, list):
        return _from_lists(found)
    if not isinstance(found, torch.Tensor):
        if getattr(getattr(found, "dtype", None), "kind", "") not in ("i", "u"):  # numpy's
            raise ValueError(f"expected integers, found {getattr(found, 'dtype', type(found).__name__)}")
        found = torch.from_numpy(found.astype("int64"))
    if found.is_floating_point() or found.is_complex() or found.dtype == torch.bool or found.layout != torch.strided:
        raise ValueError(f"expected integers, found {str(found.dtype).removeprefix('torch.')}")
    return found.long()


def _from_lists(found: list[Any]) -> torch.Tensor:
    rows = found if found and all(isinstance(row, list) for row in found) else [found]
    for at, row in enumerate(rows):
        where = f"row {at}" if rows is found else "the list"
        if any(type(value) is not int for value in row):
            wrong = next(value for value in row if type(value) is not int)
            raise ValueError(f"{where}: expected integers, found {wrong!r:.40}")
        if len(row) != len(rows[0]):
            raise ValueError(f"{where} has {len(row)} numbers: expected {len(rows[0])}, as the first")
        if any(abs(value) >= 1 << 62 for value in row):
            raise ValueError(f"{where}: expected numbers below 2^62")
    return torch.tensor(found, dtype=torch.int64)
