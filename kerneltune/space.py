"""A search space read from TOML: parameters, their values, constraints and ladders; and its feasible points.

A space file only declares. What can run at all is the kernel's `is_valid`; the `where` rules here leave out what is not
worth measuring. Every fault of a file is one line that names the file, the key and what was expected.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneltune.errors import UserError
from kerneltune.expressions import FUNCTIONS, Expression, parse_expression, suggest
from kerneltune.kernels.device import Device
from kerneltune.kernels.table_format import KEYS
from kerneltune.registry import KERNELS

if TYPE_CHECKING:
    from kerneltune.kernels.tunable import Tunable

SHIPPED = Path(__file__).parent / "search_spaces"
MAX_POINTS = 1_000_000  # a product larger than this cannot be enumerated in a reasonable time
MAX_FILE_BYTES = 1 << 20
DEVICE_NAMES = tuple(field.name for field in fields(Device))
PART = "part"  # rules may name the part: 'part == "gemm1"'
_NUMBER = re.compile(r"\s*\b\d+\b")
_ARCH = re.compile(r"(sm_\d*|gfx[0-9a-f]*)\Z")

Scalar = int | str | bool
Point = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One constraint and why it is there; `why` is what a survey counts rejections by."""

    rule: Expression
    why: str


@dataclass(frozen=True)
class Ladder:
    """The workloads of one tuning run: lists of the scaled keys, and which combinations to leave out."""

    values: Mapping[str, list[int]]
    where: Expression | None

    def steps(self) -> list[dict[str, int]]:
        """Every combination that `where` allows, first key slowest."""
        steps = [dict(zip(self.values, step, strict=True)) for step in itertools.product(*self.values.values())]
        return [step for step in steps if self.where is None or self.where(step)]


@dataclass(frozen=True)
class Survey:
    """How many points a space has for one part, workload and device."""

    total: int
    feasible: int
    rejected: Mapping[str, int]  # by rule, most frequent first


@dataclass(frozen=True)
class Space:
    """The parameters of one kernel with the values worth trying."""

    kernel: str
    path: str
    text: str  # the TOML itself, kept by recordings
    values: Mapping[str, list[Scalar]]  # in file order
    overrides: Mapping[str, Mapping[str, list[Scalar]]]  # by architecture or its prefix
    where: tuple[Rule, ...]
    ladders: Mapping[str, Ladder]

    @classmethod
    def from_text(cls, text: str, path: str = "search space") -> Space:
        """Read a space from TOML text; `path` is what errors call it.

        Raises:
            UserError: one line naming path, key and what was expected.
        """
        return _parse(text, path)

    def parameters(self, arch: str) -> dict[str, list[Scalar]]:
        """Each parameter's values on `arch` ("sm_90"); of several overrides the longest matching prefix wins."""
        merged = {name: list(values) for name, values in self.values.items()}
        for prefix in sorted(self.overrides, key=len):
            if arch.startswith(prefix):
                merged.update({name: list(values) for name, values in self.overrides[prefix].items()})
        return merged

    def ladder(self, name: str) -> list[dict[str, int]]:
        """The scaled keys of every workload of a ladder.

        Raises:
            UserError: no ladder has that name.
        """
        if name not in self.ladders:
            raise UserError(f"{self.path}: no ladder {name!r}{suggest(name, self.ladders)}")
        return self.ladders[name].steps()

    def points(self, tunable: Tunable, part: str, workload: Mapping[str, Any], device: Device) -> list[Point]:
        """The parameters that rules and kernel allow for this part, last parameter fastest."""
        return [point for point, reason in self._judged(tunable, part, workload, device) if reason is None]

    def survey(self, tunable: Tunable, part: str, workload: Mapping[str, Any], device: Device) -> Survey:
        """Count the points and why others are left out (the first rule that rejects a point counts)."""
        reasons = [reason for _, reason in self._judged(tunable, part, workload, device)]
        rejected = Counter(reason for reason in reasons if reason is not None)
        return Survey(len(reasons), reasons.count(None), dict(rejected.most_common()))

    def _judged(
        self, tunable: Tunable, part: str, workload: Mapping[str, Any], device: Device
    ) -> Iterator[tuple[Point, str | None]]:
        """Every point of the product with None, or the rule that rejects it; optional values are left out of points."""
        parameters = self.parameters(device.arch)
        self._check_parameters(tunable, part, workload, device, parameters)
        known = {**device.to_dict(), PART: part, **workload}
        rules = [(_remembering(rule.rule, known, tuple(parameters)), rule.why) for rule in self.where]
        for combination in itertools.product(*parameters.values()):
            point = dict(zip(parameters, combination, strict=True))
            reason = next((why for allows, why in rules if not allows(point)), None)
            if reason is None:
                invalid = tunable.is_valid(part, point, workload, device)
                reason = None if invalid is None else _NUMBER.sub("", invalid.split(":", 1)[0])
            yield {name: value for name, value in point.items() if value != tunable.optional.get(name)}, reason

    def _check_parameters(
        self, tunable: Tunable, part: str, workload: Mapping[str, Any], device: Device, given: Mapping[str, Any]
    ) -> None:
        """UserError unless the space has exactly the parameters of the kernel; optional ones may be missing."""
        default = tunable.default_config(workload, device)
        needed = {**(default if len(tunable.parts) == 1 else default[part]), **tunable.optional}
        for name in given:
            if name not in needed:
                raise UserError(
                    f"{self.path}: parameters.{name}: {self.kernel} has no such parameter{suggest(name, needed)}"
                )
        for name, usual in needed.items():
            if name not in given and name not in tunable.optional:
                raise UserError(f"{self.path}: parameters.{name} is missing; {self.kernel} needs {', '.join(needed)}")
            for value in given.get(name, ()):
                if type(value) is not type(usual) or (isinstance(value, int) and value < 0):
                    expected = "whole numbers from 0" if type(usual) is int else f"values such as {usual!r}"
                    raise UserError(f"{self.path}: parameters.{name}: {value!r}: expected {expected}")


def load_space(kernel_or_path: str | Path) -> Space:
    """Read the shipped space of a kernel ("moe"), or a TOML file.

    Raises:
        UserError: no such kernel or file, or a fault in it.
    """
    name = str(kernel_or_path)
    path = SHIPPED / f"{name}.toml" if name in KERNELS else Path(name)
    if not path.is_file():
        raise UserError(f"no kernel and no file {name!r}{suggest(name, list(KERNELS))}")
    shown = path.name if name in KERNELS else name
    return Space.from_text(read_toml_text(path, shown), shown)


def read_toml_text(path: Path, shown: str) -> str:
    """The text of a small TOML file.

    Raises:
        UserError: it cannot be read, is larger than 1 MiB, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise UserError(f"{shown}: expected a TOML file of at most {MAX_FILE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise UserError(f"{shown}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: not UTF-8 text (byte {error.start})") from None


def parse_toml(text: str, path: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        UserError: a syntax error, with its line.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except (RecursionError, ValueError) as error:  # nested thousands deep; an integer of thousands of digits
        raise UserError(f"{path}: not valid TOML: {type(error).__name__}") from None


def check_table(value: object, path: str, key: str, allowed: tuple[str, ...] | None = None) -> dict[str, Any]:
    """`value` as a TOML table whose keys are among `allowed`.

    Raises:
        UserError: not a table, or an unknown key.
    """
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key}: expected a table, got {value!r:.80}")
    for name in value:
        if allowed is not None and name not in allowed:
            where = f"{key}.{name}" if key else name
            raise UserError(f"{path}: unknown key {where}{suggest(name, allowed)}")
    return value


def _parse(text: str, path: str) -> Space:
    data = check_table(parse_toml(text, path), path, "", ("kernel", "parameters", "where", "arch", "ladder"))
    kernel = data.get("kernel")
    if not isinstance(kernel, str) or kernel not in KERNELS:
        hint = suggest(kernel, list(KERNELS)) if isinstance(kernel, str) else f": expected one of {', '.join(KERNELS)}"
        raise UserError(f"{path}: kernel: unknown kernel {kernel!r:.80}{hint}")
    if "parameters" not in data:
        raise UserError(f"{path}: parameters: expected a table of the values to try, found none")
    values = _value_lists(data["parameters"], path, "parameters")
    if not values:
        raise UserError(f"{path}: parameters: expected at least one parameter")
    keys = KEYS[kernel]
    names = (*values, *keys.all, *DEVICE_NAMES, PART)
    for name in values:
        if name in (*keys.all, *DEVICE_NAMES, PART, *FUNCTIONS):
            raise UserError(f"{path}: parameters.{name}: this name means something else in rules; expected another")
    overrides = _overrides(data.get("arch", {}), values, path)
    _check_size(values, overrides, path)
    return Space(
        kernel=kernel,
        path=path,
        text=text,
        values=values,
        overrides=overrides,
        where=_rules(data.get("where", []), names, path),
        ladders={
            name: _ladder(ladder, keys.scaled, path, f"ladder.{name}")
            for name, ladder in check_table(data.get("ladder", {}), path, "ladder").items()
        },
    )


def _value_lists(value: object, path: str, key: str, known: Mapping[str, Any] | None = None) -> dict[str, list[Scalar]]:
    lists = {}
    for name, values in check_table(value, path, key).items():
        where = f"{path}: {key}.{name}"
        if known is not None and name not in known:
            raise UserError(f"{where}: unknown parameter{suggest(name, known)}")
        if not isinstance(values, list) or not values:
            raise UserError(f"{where}: expected a list of values, got {values!r:.80}")
        for item in values:
            if not isinstance(item, bool | int | str):
                raise UserError(f"{where}: expected whole numbers, strings or booleans, got {item!r:.80}")
            if type(item) is not type(values[0]):
                raise UserError(f"{where}: expected values of one type, got {values[0]!r:.80} and {item!r:.80}")
        if len(set(values)) != len(values):
            twice = next(item for item in values if values.count(item) > 1)
            raise UserError(f"{where}: {twice!r} is there twice; expected each value once")
        lists[name] = values
    return lists


def _overrides(value: object, values: Mapping[str, list[Scalar]], path: str) -> dict[str, dict[str, list[Scalar]]]:
    overrides = {}
    for arch, table in check_table(value, path, "arch").items():
        key = f"arch.{arch}"
        if not _ARCH.match(arch):
            raise UserError(f"{path}: {key}: expected an architecture or the start of one, as sm_90, gfx942 or gfx9")
        table = check_table(table, path, key, ("parameters",))
        overrides[arch] = _value_lists(table.get("parameters", {}), path, f"{key}.parameters", values)
        for name, items in overrides[arch].items():
            if type(items[0]) is not type(values[name][0]):
                raise UserError(
                    f"{path}: {key}.parameters.{name}: expected values like {values[name][0]!r}, got {items[0]!r:.80}"
                )
    return overrides


def _check_size(
    values: Mapping[str, list[Scalar]], overrides: Mapping[str, Mapping[str, list[Scalar]]], path: str
) -> None:
    size = 1
    for name, items in values.items():
        size *= max(len(items), *(len(table.get(name, ())) for table in overrides.values()), 0)
    if size > MAX_POINTS:
        raise UserError(f"{path}: parameters: expected at most {MAX_POINTS} combinations, got {size}")


def _rules(value: object, names: tuple[str, ...], path: str) -> tuple[Rule, ...]:
    if not isinstance(value, list):
        raise UserError(f"{path}: where: expected [[where]] tables with rule and why, got {value!r:.80}")
    rules = []
    for number, table in enumerate(value, 1):
        key = f"where[{number}]"
        table = check_table(table, path, key, ("rule", "why"))
        why = table.get("why")
        if not isinstance(why, str) or not why.strip():
            raise UserError(f"{path}: {key}.why: expected the reason in words, got {why!r:.80}")
        rules.append(Rule(parse_expression(table.get("rule"), names, f"{path}: {key}.rule"), why.strip()))
    return tuple(rules)


def _ladder(value: object, scaled: tuple[str, ...], path: str, key: str) -> Ladder:
    table = check_table(value, path, key, (*scaled, "where"))
    values: dict[str, list[int]] = {}
    for name in scaled:
        items = table.get(name)
        numbers = isinstance(items, list) and items and all(type(item) is int and item > 0 for item in items)
        if not isinstance(items, list) or not numbers or len(set(items)) != len(items):
            raise UserError(
                f"{path}: {key}.{name}: expected a list of different positive whole numbers, got {items!r:.80}"
            )
        values[name] = items
    where = parse_expression(table["where"], scaled, f"{path}: {key}.where") if "where" in table else None
    ladder = Ladder(values, where)
    if not ladder.steps():
        raise UserError(f"{path}: {key}.where: expected at least one workload, it leaves none")
    return ladder


def _remembering(rule: Expression, known: Mapping[str, Any], parameters: tuple[str, ...]) -> Callable[[Point], bool]:
    """`rule` as a function of a point, evaluated once for each combination of the few parameters that it reads."""
    reads = [name for name in parameters if name in rule.names]
    for name in rule.names:
        if name not in known and name not in reads:
            raise UserError(f"{rule.origin}: {name!r} is not among this workload's keys")
    seen: dict[tuple[Any, ...], bool] = {}

    def allows(point: Point) -> bool:
        key = tuple(point[name] for name in reads)
        if key not in seen:
            seen[key] = rule({**known, **point})
        return seen[key]

    return allows
