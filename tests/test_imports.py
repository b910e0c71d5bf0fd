"""Imports point down: cli -> tuning, report, engines, tables -> measure, compile -> ... -> kernels -> torch, triton.

Read from the source with `ast` (imports inside functions count too), and checked once more in fresh interpreters.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (  # lowest first; a module may import its own layer and those before it
    {"kernels"},
    {"errors", "registry", "expressions", "provenance", "child", "device", "space", "compile_cache", "table_schema"},
    {"roofline", "records", "recordings", "recording_checks"},
    {"measure", "compile", "workloads"},
    {"tuning", "report", "engines", "tables", "table_check", "table_diff", "warmup"},
    {"cli"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ABOVE_ALL = {"", "__main__"}  # kerneltune/__init__.py resolves its functions on first use
TOOL_ONLY = {"optuna", "pandas", "matplotlib", "rich", "typer", "msgspec", "scipy", "pyarrow", "simpleeval", "filelock"}


@functools.cache
def imports() -> dict[str, set[tuple[str, int]]]:
    """Of each source file, relative to the root: the modules it names in import statements, with the line."""
    found: dict[str, set[tuple[str, int]]] = {}
    for folder in ("kerneltune", "kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):  # rglob does not follow the links
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("kerneltune/kernels/"):
                found[name] = set(_imported(ast.parse(path.read_text())))
    assert len(found) > 30
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or "", node.lineno
            if node.module == "kerneltune":
                yield from ((f"kerneltune.{alias.name}", node.lineno) for alias in node.names)


def part_of(file: str) -> str:
    """The unit that has a layer: "report" for kerneltune/report/text.py, "kernels" for kernels/moe/op.py."""
    words = file.removesuffix(".py").split("/")
    if words[0] == "kernels":
        return "kernels"
    return "" if words[1] == "__init__" else words[1]


def test_every_module_has_a_layer() -> None:
    unplaced = {file for file in imports() if part_of(file) not in LEVEL.keys() | ABOVE_ALL}
    assert not unplaced, "name them in LAYERS"


def test_imports_point_down() -> None:
    wrong = []
    for file, names in imports().items():
        if part_of(file) in ABOVE_ALL:
            continue
        for name, line in names:
            words = name.split(".")
            if words[0] != "kerneltune" or len(words) == 1 or words[1] == "__version__":
                continue
            if LEVEL.get(words[1], len(LAYERS)) > LEVEL[part_of(file)]:
                wrong.append(f"{file}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_kernels_import_torch_triton_and_the_standard_library_only() -> None:
    allowed = {"torch", "triton"} | set(sys.stdlib_module_names)
    for_npy_files = ("kernels/inputs.py", "numpy")  # inside a function: whoever has such a file has numpy
    wrong = [
        f"{file}:{line} imports {name}"
        for file, names in imports().items()
        for name, line in names
        if part_of(file) == "kernels"
        and name.split(".")[0] not in allowed
        and not (name == "kerneltune" or name.startswith("kerneltune.kernels"))
        and (file, name) != for_npy_files
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_report_imports_pandas_and_matplotlib() -> None:
    wrong = [
        f"{file}:{line} imports {name}"
        for file, names in imports().items()
        for name, line in names
        if name.split(".")[0] in ("pandas", "matplotlib") and part_of(file) != "report"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_checks_see_imports_inside_functions() -> None:
    tree = ast.parse("def f():\n    from kerneltune import cli\n    import pandas.io\n")
    assert {name for name, _ in _imported(tree)} == {"kerneltune", "kerneltune.cli", "pandas.io"}


def loaded(statement: str) -> tuple[set[str], bool]:
    """Top-level modules in a fresh interpreter after a statement, and whether it started CUDA."""
    code = (
        f"import json, sys\n{statement}\n"
        "cuda = sys.modules['torch'].cuda.is_initialized() if 'torch' in sys.modules else False\n"
        "print(json.dumps([sorted({name.split('.')[0] for name in sys.modules}), cuda]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, cuda = json.loads(done.stdout.splitlines()[-1])
    return set(modules), cuda


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("from kerneltune.kernels.mla_decode import mla_decode, flash_mla_with_kvcache, get_mla_metadata", TOOL_ONLY),
        ("from kerneltune.kernels.moe import fused_moe", TOOL_ONLY),
        ("import kerneltune, kerneltune.kernels", TOOL_ONLY | {"torch", "triton"}),
        ("import kerneltune.kernels.tables", TOOL_ONLY | {"torch", "triton"}),
    ],
)
def test_kernels_load_without_the_tool(statement: str, forbidden: set[str]) -> None:
    modules, cuda = loaded(statement)
    assert not modules & forbidden
    assert not cuda


def test_help_is_light() -> None:
    modules, _ = loaded(
        "from kerneltune.cli import main\ntry: main(['--help'])\nexcept SystemExit as stopped: assert not stopped.code"
    )
    assert "kerneltune" in modules
    assert not modules & {"torch", "triton", "optuna", "pandas", "matplotlib", "scipy", "pyarrow", "numpy"}
