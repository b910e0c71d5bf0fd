"""No file makes the serving path fail: whatever lies where tables are looked for is a miss with one printable warning.

2,000 cases here; `make fuzz` (KERNELTUNE_FUZZ=100000) for a night.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
import time
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneltune import table_schema
from kerneltune.device import target
from kerneltune.kernels import table_files, tables
from kerneltune.kernels.table_format import KEYS, MAX_BYTES, TableError, parse_table
from kerneltune.registry import load_tunable

CASES = int(os.environ.get("KERNELTUNE_FUZZ", "2000"))
ROOT = Path(__file__).parents[1]
DEVICE = target("sm_90")
VALIDATOR = jsonschema.Draft202012Validator(table_schema.make_schema())
WORKLOADS: dict[str, dict[str, Any]] = {kernel: dict(load_tunable(kernel).complete_workload({})) for kernel in KEYS}
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "mla-decode": {"BLOCK_H": 16, "BLOCK_N": 64, "num_splits": 4, "num_warps": 4, "num_stages": 2},
    "moe": {"gemm1": TILE, "gemm2": TILE},
}


def whole(kernel: str) -> dict[str, Any]:
    losses = {"mla-decode": {"batch=1,kv_len=2": 0.1, "inputs": {"equal": 0.0}}, "moe": {"tokens=4": 0.25}}
    entry = {
        "workload": WORKLOADS[kernel],
        "config": CONFIGS[kernel],
        "measured": {"time_us": 3.5},
        "loss": losses[kernel],
    }
    return {
        "schema": 1,
        "kernel": kernel,
        "device": DEVICE.to_dict(),
        "provenance": {"triton": "3.6.0"},
        "entries": [entry],
    }


HOSTILE_TEXT = st.sampled_from(
    ["../../etc/passwd", "a\x00b", "\x1b[2Jx", "%s%s%n", "{0.__class__}", "\ud800", "__proto__", "x" * 5000, "é\u202e",
     "", "$(touch pwned)", "__import__('os').system('touch pwned')", "nan", "uniform\n", "ids@1a2b3c4d"]
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | HOSTILE_TEXT
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, 16, 64, 1.0])
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
def files(draw: st.DrawFn) -> bytes:
    """A sound table, changed in one to three places, then perhaps as bytes."""
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
    if parsed is not None:
        VALIDATOR.validate(json.loads(data))  # what is taken is as published


def test_the_published_schema_is_the_one_of_the_code() -> None:
    """If not: python -m kerneltune.table_schema > docs/table.schema.json"""
    assert json.loads((ROOT / "docs" / "table.schema.json").read_text()) == table_schema.make_schema()
    jsonschema.Draft202012Validator.check_schema(table_schema.make_schema())


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
