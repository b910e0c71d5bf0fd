"""What a table file must look like, checked by hand: it decides what a server launches, so nothing is taken on trust.

A table says which config is best for each workload on one device (one file per kernel, dtype and device). The
file may be damaged or hostile: size, depth and every field that is used are checked, and a fault is one line naming the
field. The standard library is enough, and JSON is the whole format: nothing in it is ever run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = 1
MAX_BYTES = 16 << 20
MAX_ENTRIES = 100_000
MAX_DEPTH = 8  # table, entries, entry, config, part is 5
MAX_TEXT = 200  # characters of a string that decides something
MAX_NUMBER = 2**31  # of sizes and parameters
MAX_FIGURE = 2**63  # of every other number: no product or quotient of two leaves the range of a float

FLAGS = frozenset({"causal", "bias"})
TEXTS = frozenset({"dtype", "kv_dtype", "w_dtype", "group", "activation"})

# What a field must be where it stands; in MEASURED_FIELDS null says that nobody measured it. Fields of other names are
# for the reader alone.
Fields = Mapping[str, type]  # int: a whole number from 0; float: a number from 0
DEVICE_FIELDS: Fields = {"arch": str} | dict.fromkeys(
    ("shared_memory_per_block", "l2_bytes", "memory_bytes", "warp_size"), int
)
MEASURED_FIELDS: Fields = (
    dict.fromkeys(("time_us", "p20_us", "p80_us", "launch_us", "default_us"), float)
    | dict.fromkeys(("gbps", "tflops", "intensity", "roofline", "gain"), float)
    | {"samples": int, "bound": str, "inputs": str, "date": str, "composed": bool}
)
PROVENANCE_FIELDS: Fields = dict.fromkeys(
    ("kerneltune", "python", "triton", "torch", "cuda", "driver", "vbios", "date", "command", "source", "sampler"), str
) | {"seed": int}
CEILING_FIELDS: Fields = {"device": str, "date": str} | dict.fromkeys(
    ("dram_read_gbps", "dram_copy_gbps", "launch_us"), float
)

# The input class of a workload is a name, or a file recorded in service: "/data/ids.json@1a2b3c4d" (path and hash) in
# workloads and records, "ids@1a2b3c4d" (no folder, no suffix) in tables, where a path of another machine says nothing.
_RECORDED = re.compile(r"(.+)@([0-9a-f]{8})", re.DOTALL)
CLASS_PATTERN = "[A-Za-z0-9._-]{1,100}(@[0-9a-f]{8})?"  # in tables
_CLASS = re.compile(CLASS_PATTERN)
MAX_STEM = 100


@dataclass(frozen=True)
class Keys:
    """Which workload keys a table matches exactly, to the nearest entry, and as a hint of the input class."""

    exact: tuple[str, ...]
    scaled: tuple[str, ...]
    input: str
    usual_input: str  # the class preferred when the caller gives none

    @property
    def all(self) -> tuple[str, ...]:
        """Every workload key."""
        return (*self.exact, *self.scaled, self.input)


KEYS = {
    "mla-decode": Keys(
        exact=(
            *("dtype", "kv_dtype", "heads", "h_kv", "s_q", "causal", "page_size"),
            *("kv_lora_rank", "qk_rope_head_dim"),
        ),
        scaled=("batch", "kv_len"),
        input="lengths",
        usual_input="equal",
    ),
    "moe": Keys(
        exact=("dtype", "w_dtype", "group", "E", "global_E", "N", "K", "top_k", "activation", "bias"),
        scaled=("tokens",),
        input="routing",
        usual_input="uniform",
    ),
}


def split_recorded(value: str) -> tuple[str, str] | None:
    """Path and hash of "ids.json@1a2b3c4d"; None for a named class."""
    match = _RECORDED.fullmatch(value)
    return (match[1], match[2]) if match else None


def class_name(value: str) -> str:
    """An input class as tables write it: "/data/ids.json@1a2b3c4d" is "ids@1a2b3c4d", others are as they are."""
    named = split_recorded(value)
    if named is None:
        return value
    stem = os.path.splitext(os.path.basename(named[0]))[0]
    return f"{re.sub('[^A-Za-z0-9._-]', '-', stem)[:MAX_STEM] or '-'}@{named[1]}"


def table_workload(kernel: str, workload: Mapping[str, Any]) -> dict[str, Any]:
    """A workload as tables write it."""
    return {
        name: class_name(value) if name == KEYS[kernel].input and isinstance(value, str) else value
        for name, value in workload.items()
    }


class TableError(ValueError):
    """Why a file is not a table: one short line naming the field, whatever characters the file's names hold."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message)[:MAX_TEXT])


def printable(text: str) -> str:
    """The text with "?" for what would move a terminal's cursor or cannot be written as UTF-8."""
    return "".join(c if c.isprintable() else "?" for c in text)


@dataclass(frozen=True)
class Table:
    """A file that has been read and found sound."""

    path: str
    kernel: str
    device: Mapping[str, Any]
    provenance: Mapping[str, Any]
    entries: Sequence[Mapping[str, Any]]
    by_exact: Mapping[tuple[Any, ...], Sequence[Mapping[str, Any]]]  # values of the exact keys -> entries


def parse_table(data: bytes, path: str = "") -> Table:
    """Check the bytes of a table, by hand and completely: every field that is used later, and the sizes of all.

    Raises:
        TableError: naming the field and what was expected.
    """
    if len(data) > MAX_BYTES:
        raise TableError(f"expected at most {MAX_BYTES} bytes")
    try:
        raw = json.loads(data.decode(), parse_constant=_reject_constant, object_pairs_hook=_object)
    except RecursionError:
        raise TableError(f"nested more than {MAX_DEPTH} deep") from None
    except TableError:
        raise
    except ValueError as error:  # cut off, not JSON, not UTF-8, a number of thousands of digits
        raise TableError(f"not valid JSON: {error}") from None
    if fault := _fault(raw, MAX_DEPTH):
        path, what = fault
        raise TableError(f"{path.lstrip('.') or 'the file'}: {what}" if path else what)
    table = _mapping(raw, "the file")
    if type(table.get("schema")) is not int or table["schema"] != SCHEMA:
        raise TableError(f"schema: expected {SCHEMA}, got {_shown(table.get('schema'))}")
    kernel = _text(table.get("kernel"), "kernel")
    if kernel not in KEYS:
        raise TableError(f"kernel: unknown kernel {kernel!r}, expected one of {', '.join(KEYS)}")
    device = _mapping(table.get("device"), "device")
    _text(device.get("name"), "device.name")
    _whole(device.get("sm_count"), "device.sm_count")
    _check_fields(device, DEVICE_FIELDS, "device")
    provenance = _mapping(table.get("provenance", {}), "provenance")
    _check_provenance(provenance, "provenance")
    entries = table.get("entries")
    if not isinstance(entries, list):
        raise TableError(f"entries: expected a list, got {_shown(entries)}")
    if len(entries) > MAX_ENTRIES:
        raise TableError(f"entries: expected at most {MAX_ENTRIES}, got {len(entries)}")
    by_exact: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for number, entry in enumerate(entries):
        _check_entry(entry, KEYS[kernel], f"entries[{number}]")
        by_exact.setdefault(tuple(entry["workload"][name] for name in KEYS[kernel].exact), []).append(entry)
    return Table(path, kernel, device, provenance, entries, by_exact)


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that JSON has")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a name twice in one would let readers differ on which value counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for position, (name, _) in enumerate(pairs) if name in dict(pairs[:position]))
        raise TableError(f"the name {twice!r:.80} stands twice in one object")
    return found


def _fault(value: object, left: int) -> tuple[str, str] | None:
    """What no place of a file may hold, with the place: ".device.l2_bytes", "expected a number below ..."."""
    if isinstance(value, dict | list):
        if left == 0:
            return "", f"nested more than {MAX_DEPTH} deep"
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(name, str) and not name.isprintable():
                return "", f"expected names of printable characters, got {_shown(name)}"
            if fault := _fault(item, left - 1):
                place = f".{name:.80}" if isinstance(name, str) else f"[{name}]"
                return place + fault[0], fault[1]
    elif isinstance(value, str):
        if not value.isprintable():
            return "", f"expected printable characters, got {_shown(value)}"
    elif isinstance(value, int | float) and not -MAX_FIGURE < value < MAX_FIGURE:  # or not finite
        return "", f"expected a number below 2**{MAX_FIGURE.bit_length() - 1}, got {_shown(value)}"
    return None


def _check_entry(entry: object, keys: Keys, where: str) -> None:
    fields = _mapping(entry, where)
    check_workload(fields.get("workload"), keys, f"{where}.workload")
    config = _mapping(fields.get("config"), f"{where}.config")
    if not config:
        raise TableError(f"{where}.config: expected parameters, got none")
    for name, value in config.items():
        _text(name, f"{where}.config, a name")
        for inner, item in value.items() if isinstance(value, dict) else [("value", value)]:
            _text(inner, f"{where}.config.{name}, a name")
            _check_parameter(item, f"{where}.config.{name}" + (f".{inner}" if isinstance(value, dict) else ""))
    measured, own = (_mapping(fields.get(part, {}), f"{where}.{part}") for part in ("measured", "provenance"))
    known = {name: value for name, value in measured.items() if value is not None}
    _check_fields(known, MEASURED_FIELDS, f"{where}.measured")
    _check_provenance(own, f"{where}.provenance")
    _check_loss(_mapping(fields.get("loss", {}), f"{where}.loss"), keys, f"{where}.loss")


def check_workload(value: object, keys: Keys, where: str) -> None:
    """Raise TableError where a workload is not one as tables write it."""
    workload = _mapping(value, where)
    for name in keys.all:
        field = f"{where}.{name}"
        if name not in workload:
            raise TableError(f"{field}: is missing")
        if name == keys.input:
            if not _CLASS.fullmatch(_text(workload[name], field)):
                raise TableError(
                    f"{field}: expected a name such as uniform or ids@1a2b3c4d, got {workload[name]!r:.60}"
                )
        elif name in TEXTS:
            _text(workload[name], field)
        elif name in FLAGS:
            if not isinstance(workload[name], bool):
                raise TableError(f"{field}: expected true or false, got {_shown(workload[name])}")
        else:
            _whole(workload[name], field)
    if len(workload) != len(keys.all):
        unknown = next(name for name in workload if name not in keys.all)
        raise TableError(f"{where}: unknown key {unknown!r:.80}; it may decide what fits")


def _check_loss(loss: Mapping[str, Any], keys: Keys, where: str) -> None:
    """`inputs`: by input class. Names that hold "=": by scaled keys. Any other is not used."""
    figures = [(f"inputs.{name}", value) for name, value in _mapping(loss.get("inputs", {}), f"{where}.inputs").items()]
    for name, value in loss.items():
        if "=" in name:
            if parse_scaled(keys, name) is None:
                expected = ",".join(f"{key}=N" for key in keys.scaled)
                raise TableError(f"{where}.{name:.80}: expected a name such as {expected}")
            figures.append((name, value))
    for name, value in figures:
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise TableError(f"{where}.{name:.80}: expected a number from 0, got {_shown(value)}")


def _check_provenance(provenance: Mapping[str, Any], where: str) -> None:
    _check_fields(provenance, PROVENANCE_FIELDS, where)
    hashes = provenance.get("kernel_hash", "")
    if not isinstance(hashes, str):
        variants = _mapping(hashes, f"{where}.kernel_hash")
        _check_fields(variants, dict.fromkeys(variants, str), f"{where}.kernel_hash")
    ceilings = _mapping(provenance.get("ceilings", {}), f"{where}.ceilings")
    _check_fields(ceilings, CEILING_FIELDS, f"{where}.ceilings")
    rates = _mapping(ceilings.get("tflops", {}), f"{where}.ceilings.tflops")
    _check_fields(rates, dict.fromkeys(rates, float), f"{where}.ceilings.tflops")


def _check_fields(values: Mapping[str, Any], fields: Fields, where: str) -> None:
    for name, kind in fields.items():
        if name not in values:
            continue
        value = values[name]
        if kind in (int, float):
            allowed = int if kind is int else int | float
            sound = isinstance(value, allowed) and not isinstance(value, bool) and value >= 0
        else:
            sound = isinstance(value, kind)
        if not sound:
            words = {int: "a whole number from 0", float: "a number from 0", str: "a text", bool: "true or false"}
            raise TableError(f"{where}.{name:.80}: expected {words[kind]}, got {_shown(value)}")


def scaled_text(keys: Keys, workload: Mapping[str, Any]) -> str:
    """The scaled keys of a workload, as the losses of an entry are named: "batch=8,kv_len=2048"."""
    return ",".join(f"{name}={workload[name]}" for name in keys.scaled)


def parse_scaled(keys: Keys, text: str) -> dict[str, int] | None:
    """The inverse of `scaled_text`; None for any other text."""
    pairs = [item.partition("=") for item in text.split(",")] if len(text) <= MAX_TEXT else []
    found = {name: int(value) for name, _, value in pairs if value.isascii() and value.isdecimal()}
    sound = tuple(found) == keys.scaled and all(0 < value < MAX_NUMBER for value in found.values())
    return found if sound and scaled_text(keys, found) == text else None


def _check_parameter(value: object, where: str) -> None:
    if isinstance(value, str):
        _text(value, where)
    elif not isinstance(value, bool | int) or abs(value) >= MAX_NUMBER:
        raise TableError(f"{where}: expected a whole number, a text or true or false, got {_shown(value)}")


def _mapping(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{where}: expected an object, got {_shown(value)}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise TableError(f"{where}: expected a text of 1 to {MAX_TEXT} printable characters, got {_shown(value)}")
    return value


def _whole(value: object, where: str) -> int:
    if type(value) is not int or not 0 < value < MAX_NUMBER:
        raise TableError(f"{where}: expected a whole number from 1, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A value for a message: never long, never several lines."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "nothing" if value is None else f"{value!r:.60}"
