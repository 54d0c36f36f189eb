"""The layout of the project: the tree in the docs, the direction of imports, one test file per source file."""

from __future__ import annotations

import ast
import doctest
import importlib
import re
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import affine_attention

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "affine_attention"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py"))
ROOMS = ("ops", "nn", "hf", "lab", "recipes", "study", "cli")  # imports go from right to left


def room_of(path: Path) -> str:
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of this package that a file imports, at any depth of the file."""
    package = path.relative_to(ROOT).parent.parts
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "affine_attention" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    room = room_of(path)
    if room not in ROOMS:
        return
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "version"}
    assert imported_rooms(path) & set(ROOMS) <= allowed


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_source_file_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no docstring"


# Kernels are tested through the operation that they implement: source -> test file, below tests/.
TESTED_BY = {
    "nn/commit.py": "nn/test_scaling.py",
    "nn/self_attention.py": "nn/test_attention.py",
    "ops/fused/cudnn/backward.py": "ops/fused/cudnn/test_cudnn.py",
    "ops/fused/cudnn/forward.py": "ops/fused/cudnn/test_cudnn.py",
    "ops/fused/cudnn/kernels.py": "ops/fused/cudnn/test_cudnn.py",
    "ops/fused/decode/attention.py": "ops/fused/decode/test_decode.py",
    "ops/fused/decode/kernels.py": "ops/fused/decode/test_decode.py",
    "ops/fused/decode/op.py": "ops/fused/decode/test_decode.py",
    "ops/fused/flash/backward.py": "ops/fused/flash/test_kernels.py",
    "ops/fused/flash/forward.py": "ops/fused/flash/test_kernels.py",
    "ops/fused/hopper/backward_kernels.py": "ops/fused/hopper/test_backward.py",
    "ops/fused/hopper/forward_kernels.py": "ops/fused/hopper/test_forward.py",
    "ops/fused/hopper/gluon_forward_kernels.py": "ops/fused/hopper/test_gluon_forward.py",
    "ops/fused/hopper/visible_tiles.py": "ops/fused/hopper/test_gluon_forward.py",
    "ops/fused/hopper/recompute.py": "ops/fused/hopper/test_backward.py",
    "ops/fused/hopper/recompute_kernels.py": "ops/fused/hopper/test_backward.py",
    "ops/fused/op.py": "ops/fused/flash/test_kernels.py",
    "ops/fused/plan.py": "ops/fused/test_host_cost.py",
    "ops/fused/projection_kernels.py": "ops/fused/test_projection.py",
    "ops/fused/shared/allocation.py": "ops/fused/shared/test_launch.py",
    "ops/fused/shared/descriptors.py": "ops/fused/shared/test_launch.py",
    "ops/fused/shared/prologue.py": "ops/fused/cudnn/test_cudnn.py",
    "ops/fused/shared/rule.py": "ops/fused/shared/test_limits.py",
    "ops/fused/shared/tile_sizes.py": "ops/fused/shared/test_tuned.py",
    "ops/fused/shared/tile_functions.py": "ops/fused/flash/test_kernels.py",
    "ops/fused/shared/workspace.py": "ops/fused/hopper/test_backward.py",
    "__main__.py": "test_cli.py",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_source_file_has_its_test_file(path):
    """`lab/training/lock.py` is tested by `tests/lab/training/test_lock.py`, in nested packages too."""
    if path.name in ("__init__.py", "version.py"):
        return
    name = path.relative_to(PACKAGE)
    test = TESTED_BY.get(name.as_posix(), (name.parent / f"test_{name.stem}.py").as_posix())
    assert (ROOT / "tests" / test).is_file(), f"{name} needs tests/{test}"


def test_the_table_of_shared_tests_has_no_stale_entries():
    for source, test in TESTED_BY.items():
        assert (PACKAGE / source).is_file(), source
        own = (ROOT / "tests" / source).with_name(f"test_{Path(source).name}")
        assert not own.is_file(), f"{source} has its own test: drop it from TESTED_BY"
        assert (ROOT / "tests" / test).is_file(), test


def test_the_tree_in_the_docs_is_the_tree():
    page = (ROOT / "docs/layout.md").read_text()
    block = re.search(r"```text\n(affine_attention/.*?)```", page, re.DOTALL)
    assert block, "docs/layout.md shows the tree in a ```text block that starts with affine_attention/"
    folders = [""]
    named = set()
    for line in block.group(1).splitlines():
        found = re.match(r"( *)(\S+)", line)
        if not found:
            continue
        depth, name = len(found.group(1)) // 2, found.group(2)
        folders = [*folders[: depth + 1], folders[depth] + name] if name.endswith("/") else folders[: depth + 1]
        named.add(folders[depth] + name)
    for name in named:
        assert (ROOT / name).exists(), f"docs/layout.md names {name}, which is not there"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    shown = {name for name in named if name.endswith("/")}
    for file in tracked:
        if file.startswith("affine_attention/") and file.endswith(".py") and not file.endswith("__init__.py"):
            parent = file.rsplit("/", 1)[0] + "/"
            if f"{parent}__all__" in shown or not any(n.startswith(parent) and n != parent for n in named):
                continue  # a folder that is shown as one line
            assert file in named, f"the tree in docs/layout.md does not name {file}"


@pytest.mark.parametrize(("module", "page"), [("affine_attention", "core"), ("affine_attention.hf", "hf")])
def test_public_names_exist_and_are_in_the_api_reference(module, page):
    docs = (ROOT / f"docs/api/{page}.md").read_text()
    public = importlib.import_module(module)
    for name in public.__all__:
        assert hasattr(public, name)
        if not name.startswith("__"):
            assert f"{module}.{name}" in docs, f"docs/api/{page}.md does not name {name}"


@pytest.mark.parametrize(
    "name",
    [
        "affine_attention.ops.api",
        "affine_attention.ops.varlen",
        "affine_attention.nn.mechanism",
        "affine_attention.nn.self_attention",
    ],
)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    import torch

    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0


def test_what_is_tested_is_pinned_and_what_is_required_stays_open():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.11"]
    pins = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in pins
    extras = project["optional-dependencies"]
    for requirement in [wish for extra in extras.values() for wish in extra]:
        if not requirement.startswith(project["name"]):
            assert re.match(r"[a-z-]+", requirement).group(0) + "==" in pins, requirement


def test_a_run_counts_its_skips_by_reason():
    from tests.conftest import skip_reasons

    reasons = ["Skipped: needs a CUDA GPU", "Skipped: needs a CUDA GPU", "no Chromium"]
    reports = [SimpleNamespace(longrepr=("file.py", 1, reason)) for reason in reasons]
    assert skip_reasons(reports) == {"needs a CUDA GPU": 2, "no Chromium": 1}


def test_the_changelog_knows_the_version():
    assert f"## {affine_attention.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_no_machine_paths_in_tracked_files():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    home = re.compile(r"/(home|root|Users)/\w+|/work/main")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt") and path.name != "test_house.py" and "data" not in path.parts:
            assert not home.search(path.read_text()), name
