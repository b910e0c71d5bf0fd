"""What a user installs: one import name, every kernel, space and table in it, from a wheel and from a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "search_spaces", "results")
PACKAGED = ("pyproject.toml", "README.md", "LICENSE", "kerneltune", *LINKED)
DATA = {".json", ".jsonl", ".csv", ".parquet"}  # of results/; pictures stay in the repository

pytestmark = pytest.mark.xdist_group("packaging")  # one wheel for all of them


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative_and_lead_to_the_folder_beside_the_package(name: str) -> None:
    link = ROOT / "kerneltune" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", LINKED)
def test_the_linked_folders_are_no_packages_of_their_own(name: str) -> None:
    """`kernels/__init__.py` would hide the distribution `kernels` from who runs Python in the checkout."""
    assert (ROOT / name).is_dir()
    assert not (ROOT / name / "__init__.py").exists()


def test_no_source_imports_the_linked_folders_by_their_bare_name() -> None:
    """A bare import would load a kernel a second time, as another module with its own caches."""
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(LINKED)})\b", re.MULTILINE)
    folders = ("kerneltune", "kernels", "tests", "benchmarks", "results", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 30
    assert not [str(path) for path in paths if bare.search(path.read_text())]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from a copy so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", "pip", *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel installed into an empty folder (its dependencies are those of the running interpreter)."""
    target = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-compile", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True, capture_output=True)
    return target


def test_the_wheel_installs_one_import_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (top_level,) = [name for name in names if name.endswith(".dist-info/top_level.txt")]
        assert archive.read(top_level).decode().split() == ["kerneltune"]
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kerneltune"}


def test_the_wheel_holds_every_kernel_space_and_result(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.getinfo(name).file_size for name in archive.namelist()}
    wanted = list((ROOT / "kernels").rglob("*.py"))
    wanted += (ROOT / "search_spaces").rglob("*.toml")
    wanted += [path for path in (ROOT / "results").rglob("*") if path.suffix in DATA]
    assert len(wanted) > 10
    expected = {f"kerneltune/{path.relative_to(ROOT).as_posix()}": path.stat().st_size for path in wanted}
    expected |= {
        path.relative_to(ROOT).as_posix(): path.stat().st_size
        for path in (ROOT / "kerneltune").rglob("*.py")
        if path.relative_to(ROOT / "kerneltune").parts[0] not in LINKED
    }
    assert not {name for name, size in expected.items() if packed.get(name) != size}
    assert "kerneltune/py.typed" in packed


def run_installed(site: Path, cwd: Path, *arguments: str) -> str:
    """Run Python elsewhere with the installed copy first on the path; returns its stdout."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment = inherited | {"PYTHONPATH": str(site)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_command_runs_elsewhere(site: Path, tmp_path: Path) -> None:
    assert "search" in run_installed(site, tmp_path, "-m", "kerneltune", "--help")
    assert "kerneltune 0." in run_installed(site, tmp_path, "-m", "kerneltune", "--version")
    spaces = run_installed(site, tmp_path, "-m", "kerneltune", "spaces", "mla-decode", "--target", "sm_90")
    assert "num_splits" in spaces
    (script,) = (site / "bin").iterdir()
    assert script.name == "kerneltune"


@pytest.mark.parametrize(
    "module", ["kerneltune.kernels.mla_decode", "kerneltune.kernels.moe", "kerneltune.kernels.tables"]
)
def test_the_installed_kernels_import_elsewhere(site: Path, tmp_path: Path, module: str) -> None:
    path = run_installed(site, tmp_path, "-c", f"import {module} as module; print(module.__file__)")
    assert Path(path.strip()).is_relative_to(site)


def test_the_installed_data_is_found_elsewhere(site: Path, tmp_path: Path) -> None:
    code = (
        "from kerneltune.space import load_space\n"
        "from importlib.resources import files\n"
        "spaces = [load_space(kernel) for kernel in ('mla-decode', 'moe')]\n"
        "print(len(list((files('kerneltune') / 'search_spaces').iterdir())))"
    )
    assert int(run_installed(site, tmp_path, "-c", code)) >= 3


def test_the_checkout_runs_uninstalled(tmp_path: Path) -> None:
    assert "report" in run_installed(ROOT, tmp_path, "-m", "kerneltune", "--help")
