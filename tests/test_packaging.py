"""The wheel builds, has the right content, and works when installed elsewhere."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import affine_attention

ROOT = Path(__file__).parent.parent


def test_a_wheel_builds_and_installs_elsewhere(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert affine_attention.__version__ in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "affine_attention/py.typed" in names
    assert "affine_attention/ops/fused/cudnn/kernels.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]

    target = tmp_path / "elsewhere"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    assert subprocess.run(install, capture_output=True).returncode == 0
    code = (
        "import torch, affine_attention as a; x = torch.ones(1, 2, 3, 4); "
        "print(a.__file__, a.attention(x, x, x, is_causal=True).sum().item())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(target)}, capture_output=True, text=True
    )
    assert ran.stdout.startswith(str(target)), ran.stderr
    assert ran.stdout.split()[-1] == "24.0"
