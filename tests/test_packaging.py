"""The wheel builds, holds what it should and nothing else, and runs the README's lines in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import affine_attention
from tests.docs_commands import fences

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert affine_attention.__version__ in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "affine_attention/py.typed" in names
    assert "affine_attention/ops/fused/cudnn/kernels.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/", "docs/", "studies/"))]


def test_the_readme_runs_in_an_empty_environment(wheel, without_hub, tmp_path):
    """The environment sees the installed dependencies, but neither this repository nor its editable install."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(install, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    snippets = [code for language, code in fences(ROOT / "README.md") if language == "python"]
    script = "\n".join([*snippets, "import affine_attention", "print(affine_attention.__file__)"])
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([python, "-c", without_hub(script)], cwd=tmp_path, env=offline, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith(str(packages))
    command = subprocess.run(
        [tmp_path / "env/bin/affine", "--version"], cwd=tmp_path, env=offline, capture_output=True, text=True
    )
    assert command.stdout.strip() == f"affine_attention {affine_attention.__version__}", command.stderr
