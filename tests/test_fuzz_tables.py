"""No file makes the serving path fail: whatever lies where tables are looked for is a miss with one printable warning.

2,000 cases here; `make fuzz` (KERNELTUNE_FUZZ=100000) for a night.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneltune import cli, table_schema
from kerneltune.compile import Compiled
from kerneltune.device import target
from kerneltune.kernels import table_files, tables
from kerneltune.kernels.table_format import KEYS, MAX_BYTES, TableError, parse_table
from kerneltune.provenance import kernel_hash
from kerneltune.registry import load_tunable

CASES = int(os.environ.get("KERNELTUNE_FUZZ", "2000"))
ROOT = Path(__file__).parents[1]
DEVICE = target("sm_90")
VALIDATOR = jsonschema.Draft202012Validator(table_schema.make_schema())
WORKLOADS: dict[str, dict[str, Any]] = {kernel: dict(load_tunable(kernel).complete_workload({})) for kernel in KEYS}
TILE = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mla-decode": {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": 4, "num_warps": 4, "num_stages": 2},
    "moe": {"gemm1": TILE, "gemm2": TILE},
}
HASHES = {kernel: kernel_hash(load_tunable(kernel)) for kernel in KEYS}
SIZES = {"mla-decode": "batch", "moe": "tokens"}


def whole(kernel: str) -> dict[str, Any]:
    losses = {"mla-decode": {"batch=1,kv_len=2": 0.1, "inputs": {"equal": 0.5}}, "moe": {"tokens=4": 0.25}}
    measured: dict[str, Any] = {
        "time_us": 3.5,
        "p20_us": 3.25,
        "p80_us": 3.75,
        "launch_us": 1.5,
        "default_us": 4.5,
        "samples": 16,
    }
    measured |= {"gbps": 100.5, "tflops": 1.5, "roofline": 0.5, "bound": "memory", "gain": 1.5, "inputs": "equal"}
    entry = {
        "workload": WORKLOADS[kernel],
        "config": CONFIGS[kernel],
        "measured": measured | {"date": "2026-12-01", "composed": False},
        "loss": losses[kernel],
    }
    ceilings = {"device": "NVIDIA H200", "date": "2026-12-01", "dram_read_gbps": 4500.5, "tflops": {"bf16": 790.5}}
    provenance: dict[str, Any] = {
        "triton": "3.6.0",
        "torch": "2.13.0",
        "driver": "580",
        "date": "2026-12-01T06:37:32+00:00",
        "seed": 0,
    }
    return {
        "schema": 1,
        "kernel": kernel,
        "device": DEVICE.to_dict(),
        "provenance": provenance
        | {"command": "kerneltune search", "kernel_hash": HASHES[kernel], "ceilings": ceilings},
        "entries": [entry],
    }


HOSTILE_TEXT = st.sampled_from(
    ["../../etc/passwd", "a\x00b", "\x1b[2Jx", "%s%s%n", "{0.__class__}", "\ud800", "__proto__", "x" * 5000, "é\u202e",
     "", "$(touch pwned)", "__import__('os').system('touch pwned')", "nan", "uniform\n", "ids@1a2b3c4d"]
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | HOSTILE_TEXT
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**1022, 2**1024, 10**400, 1e308, -0.0, 5e-324, 16, 64, 1.0])
)  # fmt: skip
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | HOSTILE_TEXT, inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        found += places(item, (*path, name))
    return found


@st.composite
def files(draw: st.DrawFn, damaged: bool = True) -> bytes:
    """A sound table, changed in one to three places, then perhaps, if `damaged`, as bytes."""
    table = copy.deepcopy(whole(draw(st.sampled_from(sorted(KEYS)))))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(table)))
        holder: Any = table
        for name in path[:-1]:
            holder = holder[name]
        kind = draw(st.sampled_from(["put", "delete", "rename", "add"]))
        if kind == "put":
            holder[path[-1]] = draw(JSON)
        elif kind == "delete" or not isinstance(holder, dict):
            del holder[path[-1]]
        elif kind == "rename":
            holder[draw(HOSTILE_TEXT)] = holder.pop(path[-1])
        else:
            holder[draw(st.text(max_size=6) | HOSTILE_TEXT)] = draw(JSON)
        if not places(table):
            break
    data = json.dumps(table).encode()
    if not damaged:
        return data
    damage = draw(
        st.sampled_from(["", "", "", "cut", "flip", "insert", "twice", "bom", "utf16", "huge number", "binary"])
    )
    at = draw(st.integers(0, len(data)))
    if damage == "cut":
        return data[:at]
    if damage in ("flip", "insert"):
        return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at + (damage == "flip") :]
    if damage == "twice":
        return data.replace(b'"kernel":', b'"kernel": "moe", "kernel":', 1)
    if damage == "bom":
        return b"\xef\xbb\xbf" + data
    if damage == "utf16":
        return data.decode().encode("utf-16")
    if damage == "huge number":
        return data.replace(b"3.5", b"1e999", 1)
    return draw(st.binary(max_size=200)) if damage == "binary" else data


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("KERNELTUNE_TABLES", raising=False)
    monkeypatch.setattr(table_files, "_shipped", lambda: ())
    monkeypatch.chdir(tmp_path)
    yield
    tables.forget()
    tables._said.clear()


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(files())
def test_no_bytes_make_a_lookup_fail(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(data)
    before = set(sys.modules), sorted(os.listdir(tmp_path))
    try:
        parsed = parse_table(data, str(path))
        reason = ""
    except TableError as error:
        parsed, reason = None, str(error)
        assert reason.isprintable()
    for kernel, workload in WORKLOADS.items():
        table_files._files.clear()
        tables._said.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                config = tables.resolve(kernel, workload, DEVICE, path)
        assert len(caught) <= 2  # the file, and that the default is used; or: of a relative, and stale
        assert all(str(each.message).isprintable() for each in caught)
        if parsed is None:
            assert config is None
            assert sum("table left out" in str(each.message) for each in caught) == 1
        if config is not None:
            assert config in [entry["config"] for entry in parsed.entries]  # type: ignore[union-attr]
    assert (set(sys.modules), sorted(os.listdir(tmp_path))) == before  # nothing was imported, written or run


# -- the commands that read tables -------------------------------------------------------------------------------------
COMMANDS = (
    ["lookup", "{kernel}", "{size}=8", "--table", "{file}", "--target", "sm_90"],
    ["lookup", "{kernel}", "{size}=8", "--table", "{file}", "--target", "sm_90", "--json"],
    ["lookup", "{kernel}", "{size}=100000", "--table", "{file}", "--device", "NVIDIA H100:132:sm_90"],
    ["lookup", "{kernel}", "{size}=100000", "--table", "{file}", "--device", "NVIDIA H100:132:sm_90", "--json"],
    *(["report", "out", "--format", form] for form in ("text", "json", "csv", "markdown")),
    ["check", "{file}"],
    ["check", "out", "--json"],
    ["diff", "{file}", "good.json"],
    ["diff", "good.json", "{file}", "--json"],
    *(["merge", "{file}", "good.json", "--to", "merged", "--prefer", prefer] for prefer in ("newest", "fastest")),
    ["merge", "{file}", "good.json", "--to", "merged", "--json"],
    ["export", "{file}", "--to", "ship"],
    ["export", "{file}", "--to", "vllm", "--format", "vllm", "--json"],
    ["export", "{file}", "--to", "sglang", "--format", "sglang"],
    ["import", "{file}", "--out", "imported", "--json"],
    ["warmup", "--table", "{file}", "--target", "sm_90"],
    ["warmup", "--table", "{file}", "--target", "sm_90", "--json"],
)


class NoCompiles:
    """Stands for the processes of a warmup: what is compiled is the business of its own tests."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def __enter__(self) -> NoCompiles:
        return self

    def __exit__(self, *_: object) -> None: ...
    def submit(self, number: int, part: str, config: dict[str, Any], workload: dict[str, Any]) -> None:
        json.dumps([config, workload])

    def result(self, number: int) -> Compiled:
        return Compiled("ok", compile_s=0.0)


@pytest.fixture
def cheap_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line is built once, and no process is started."""
    built = typer.main.get_command(cli.build_app())
    monkeypatch.setattr(cli, "build_app", lambda: None)
    monkeypatch.setattr(typer.main, "get_command", lambda _: built)
    monkeypatch.setattr("kerneltune.warmup.CompilePool", NoCompiles)
    monkeypatch.setattr("os.fsync", lambda _: None)


def run_command(words: list[str]) -> None:
    """Fails unless it ends with 0, 1 or 2, prints what can be printed, JSON as JSON, and an error as one line."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("always")
        code = cli._run(words, False)
    told = err.getvalue().splitlines()
    assert code in (0, 1, 2), (words, told)
    assert all(line.isprintable() for line in [*told, *out.getvalue().splitlines()]), (words, told)
    assert [line.startswith("error: ") for line in told].count(True) == (code == 2), (words, told)
    if code != 2 and ("--json" in words or "json" in words):

        def no_number(name: str) -> None:
            raise AssertionError(f"{words}: {name} is not JSON")

        json.loads(out.getvalue(), parse_constant=no_number)


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(files(), st.sampled_from(COMMANDS))
def test_no_bytes_make_a_command_fail(tmp_path: Path, cheap_commands: None, data: bytes, drawn: list[str]) -> None:
    """A file that is refused meets one command, since they all refuse it in one place; one that is taken meets all."""
    path = tmp_path / "out" / "tables" / "t.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    table_files._files.clear()
    try:
        kernel, commands = parse_table(data).kernel, COMMANDS
    except TableError:
        kernel, commands = "moe", (drawn,)
    Path("good.json").write_text(json.dumps(whole(kernel)))
    for words in commands:
        run_command([word.format(kernel=kernel, size=SIZES[kernel], file=path) for word in words])
        for folder in ("merged", "ship", "vllm", "sglang", "imported"):
            shutil.rmtree(folder, ignore_errors=True)


BOUNDED = [("entries", 0, "loss", "tokens=4"), ("entries", 0, "measured", "time_us"), ("device", "memory_bytes")]
BOUNDED += [("provenance", "ceilings", "dram_read_gbps"), ("provenance", "seed"), ("entries", 0, "more")]


@pytest.mark.parametrize("place", BOUNDED, ids=lambda place: place[-1])
@pytest.mark.parametrize(
    "number", [2**63, 2**1022, 2**1024, 10**400, 1e308, -(2**63)], ids=["63", "1022", "1024", "10**400", "1e308", "-63"]
)
def test_no_number_is_so_large_that_a_command_overflows(
    tmp_path: Path, cheap_commands: None, place: tuple[Any, ...], number: float
) -> None:
    table: Any = whole("moe")
    holder = table
    for name in place[:-1]:
        holder = holder[name]
    holder[place[-1]] = number
    path = tmp_path / "t.json"
    path.write_text(json.dumps(table))
    named = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in place)[1:]
    with pytest.raises(TableError, match=re.escape(f"{named}: expected a number below 2**63")):
        parse_table(path.read_bytes())
    assert not VALIDATOR.is_valid(table)
    run_command(["lookup", "moe", "tokens=8", "--table", str(path), "--target", "sm_90", "--json"])


# -- the published schema ----------------------------------------------------------------------------------------------
def expressible(value: Any) -> bool:
    """Whether a schema can tell all about it: see its description."""
    if isinstance(value, dict):
        return all(name.isprintable() and expressible(item) for name, item in value.items())
    if isinstance(value, list):
        return all(map(expressible, value))
    if isinstance(value, float):
        return not value.is_integer()
    return not isinstance(value, str) or value.isprintable()


@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
@given(files(damaged=False))
def test_the_loader_takes_what_the_schema_takes(data: bytes) -> None:
    try:
        value = json.loads(data, parse_constant=lambda _: 2.5e30, parse_float=lambda text: min(float(text), 2.5e30))
    except ValueError:
        return
    if not expressible(value):
        return
    try:
        parse_table(data)
        reason = ""
    except TableError as error:
        reason = str(error)
    assert VALIDATOR.is_valid(value) == (not reason), reason


def test_what_a_schema_cannot_say_is_in_its_description() -> None:
    table = whole("moe")
    table["entries"][0]["workload"] = WORKLOADS["moe"] | {"tokens": 64.0}
    VALIDATOR.validate(table)
    with pytest.raises(TableError, match=r"workload.tokens: expected a whole number from 1, got 64.0"):
        parse_table(json.dumps(table).encode())
    assert "64, not 64.0" in table_schema.make_schema()["description"]


@pytest.mark.parametrize("size", [1, 9, 10, 2**31 - 1, 2**31, 2**31 + 1, 3 * 10**9, 10**10, 2**63])
@pytest.mark.parametrize("ending", ["", "\n", " "])
def test_sizes_in_names_of_losses_are_bounded_as_sizes_are(size: int, ending: str) -> None:
    table = whole("moe")
    table["entries"][0]["loss"] = {f"tokens={size}{ending}": 0.5}
    sound = size < 2**31 and not ending
    assert VALIDATOR.is_valid(table) == sound
    with contextlib.nullcontext() if sound else pytest.raises(TableError):
        parse_table(json.dumps(table).encode())


def test_the_published_schema_is_the_one_of_the_code() -> None:
    """If not: python -m kerneltune.table_schema > docs/table.schema.json"""
    assert json.loads((ROOT / "docs" / "table.schema.json").read_text()) == table_schema.make_schema()
    jsonschema.Draft202012Validator.check_schema(table_schema.make_schema())


def test_check_prints_the_schema(cheap_commands: None) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli._run(["check", "--schema"], False) == 0
    assert out.getvalue() == (ROOT / "docs" / "table.schema.json").read_text()


def test_shipped_tables_are_as_published() -> None:
    found = sorted((ROOT / "results").glob("*/tables/*.json"))
    assert found
    for path in found:
        VALIDATOR.validate(json.loads(path.read_text()))


@pytest.mark.parametrize("kernel", KEYS)
def test_the_schema_refuses_what_it_should(kernel: str) -> None:
    VALIDATOR.validate(whole(kernel))
    for path in (("entries", 0, "workload", "dtype"), ("device", "name"), ("entries", 0, "config")):
        bad: Any = whole(kernel)
        holder = bad = copy.deepcopy(bad)
        for name in path[:-1]:
            holder = holder[name]
        holder[path[-1]] = []
        assert not VALIDATOR.is_valid(bad), path
        with pytest.raises(TableError):
            parse_table(json.dumps(bad).encode())
    more = copy.deepcopy(whole(kernel))
    more["entries"][0]["workload"]["wave"] = 1
    assert not VALIDATOR.is_valid(more)


# -- what is no ordinary file -----------------------------------------------------------------------------------------
def one_warning(path: Path) -> str:
    """The one warning of looking a workload up in `path`, which holds no table."""
    tables._said.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert tables.find("moe", WORKLOADS["moe"], DEVICE, tables=[path], only=True) is None
    (message,) = [str(each.message) for each in caught]
    assert message.isprintable()
    return message


def test_a_gigabyte_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    begin = time.monotonic()
    tracemalloc.start()
    try:
        assert f"at most {MAX_BYTES} bytes" in one_warning(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_BYTES
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begin < 5


def test_depth_width_and_doubles(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for data, says in (
        (b'{"a":' * 100_000, "nested more than 8 deep"),
        (b'{"schema": 1, "schema": 1}', "the name 'schema' stands twice in one object"),
        (b'{"entries": [' + b"0," * 200_000 + b"0]}", "schema: expected 1"),
        (b'{"x": "' + b"y" * 100_000, "not valid JSON"),
    ):
        path.write_bytes(data)
        assert says in one_warning(path)


def test_links_folders_and_a_file_that_changes(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    assert "Too many levels of symbolic links" in one_warning(tmp_path / "loop.json")
    folder = tmp_path / "folder"
    (folder / "inner.json").mkdir(parents=True)
    assert "not a regular file" in one_warning(folder)
    path = folder / "t.json"
    (folder / "inner.json").rmdir()
    good = json.dumps(whole("moe")).encode()
    for size in (len(good) // 2, len(good), len(good) // 3, len(good)):
        path.write_bytes(good[:size])
        os.utime(path, ns=(0, size))  # as a clock of coarse ticks has it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            match = tables.find("moe", WORKLOADS["moe"], DEVICE, tables=[path], only=True)
        assert (match is not None) == (size == len(good))


def test_a_full_disk_leaves_the_old_table_and_nothing_else(tmp_path: Path) -> None:
    """A file-size limit stands for the disk: the write fails in the same place, with the same kind of error."""
    from kerneltune.tables import make_table, write_table

    path = tmp_path / "t.json"
    entry = {"workload": WORKLOADS["moe"], "config": CONFIGS["moe"], "measured": {}, "loss": {}}
    write_table(path, make_table("moe", DEVICE.to_dict(), {}, [entry]))
    before = path.read_bytes()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        other = entry | {"workload": WORKLOADS["moe"] | {"tokens": 77}}
        try:
            write_table(path, make_table("moe", DEVICE.to_dict(), {}, [other]))
        except OSError as error:
            os._exit(7 if error.strerror == "File too large" else 8)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert path.read_bytes() == before
    assert [name for name in os.listdir(tmp_path) if name.endswith(".tmp")] == []


def test_what_a_killed_writer_left_is_cleaned_by_the_next(tmp_path: Path) -> None:
    from kerneltune.tables import make_table, write_table

    path = tmp_path / "t.json"
    (tmp_path / ".t.json.4711.tmp").write_text("half")
    (tmp_path / ".other.json.4711.tmp").write_text("not ours")
    entry = {"workload": WORKLOADS["moe"], "config": CONFIGS["moe"], "measured": {}, "loss": {}}
    write_table(path, make_table("moe", DEVICE.to_dict(), {}, [entry]))
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith(".tmp")) == [".other.json.4711.tmp"]


def test_a_lock_that_is_never_given_back_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    from kerneltune import tables as written
    from kerneltune.errors import UserError

    monkeypatch.setattr(written, "LOCK_SECONDS", 0.2)
    entry = {"workload": WORKLOADS["moe"], "config": CONFIGS["moe"], "measured": {}, "loss": {}}
    table = written.make_table("moe", DEVICE.to_dict(), {}, [entry])
    with FileLock(tmp_path / ".t.json.lock"), pytest.raises(UserError, match="locked by another process"):
        written.write_table(tmp_path / "t.json", table)
