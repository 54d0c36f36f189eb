"""Writes the operator as a folder that the package `kernels` loads: `python -m affine_attention.hub_kernel FOLDER`.

`kernels.get_local_kernel(Path(FOLDER))` imports it, and the folder can be uploaded to the Hugging Face Hub as a kernel
repository. It holds its own copy of the operator's sources, because kernels must not import packages that are not
installed, and registers its PyTorch operators under a name of its own, so that it can be loaded beside the package and
beside other versions of itself.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

from .files import expanded, write_text
from .version import __version__

PACKAGE = Path(__file__).parent
SOURCES = ("ops/**/*.py", "messages.py", "cache.py", "files.py")
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
VARIANT = "build/torch-universal"  # Python and Triton sources for every backend
MAJOR = 1  # changes when an argument changes its meaning
# Where sources name the library of their operators or their own modules.
OWN_NAME = re.compile(r'(?<=ops\.)affine_attention(?=\.)|(?<=")affine_attention(?=("|::|\.ops\.))')

INIT = '''"""Affine-Scaled Attention and attention with sinks by flash-attention's functions (version {version})."""

from .ops import attention, attention_varlen, decode_attention
from .ops.flash_attention import {functions}

__all__ = {names}
'''
README = """---
library_name: kernels
license: apache-2.0
---

# affine-attention

`gate * (alpha * softmax_with_sink(Q K^T) V + beta * sum of visible V)`: Affine-Scaled Attention (arXiv 2602.23057) and
softmax attention with sinks, forward and backward, by flash-attention's functions. Triton on a CUDA GPU, PyTorch's
kernels elsewhere. Version {version}.

```python
from kernels import get_kernel

kernel = get_kernel("OWNER/NAME", version={major}, trust_remote_code=True)
out = kernel.flash_attn_func(q, k, v, causal=True, window_size=(127, 0), s_aux=sinks)  # [B, T, H, D]
```

Functions: {functions}; `alpha`, `beta` and `gate` are additional keyword arguments. Dropout, softcap and alibi slopes
are refused by name.
"""


def write_hub_kernel(folder: str | Path) -> Path:
    """Writes the kernel repository into a folder, new or empty or written by this function before; returns it.

    The name of the kernel contains a digest of its sources, so equal sources give equal files.
    """
    target = expanded(folder, "folder")
    if target.exists() and (not target.is_dir() or (any(target.iterdir()) and not (target / VARIANT).is_dir())):
        raise ValueError(f"folder must be new, empty or a kernel folder, got {target}, which has other content")
    sources = {
        path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8")
        for pattern in SOURCES
        for path in sorted(PACKAGE.glob(pattern))
    }
    functions = ", ".join(FUNCTIONS)
    names = ["attention", "attention_varlen", "decode_attention", *FUNCTIONS]
    sources["__init__.py"] = INIT.format(version=__version__, functions=functions, names=names)
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:12]
    name = f"_affine_attention_{digest}"
    metadata = {
        "name": "affine-attention", "id": name, "version": MAJOR, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cpu"},
    }  # fmt: skip
    build = target / VARIANT
    if build.is_dir():
        for path in sorted(build.rglob("*.py")):  # sources of an older version
            if path.relative_to(build).as_posix() not in sources:
                path.unlink()
    for file, text in sources.items():
        write_text(build / file, OWN_NAME.sub(name, text) if file.startswith("ops/") else text)
    write_text(build / "metadata.json", json.dumps(metadata, indent=1) + "\n")
    write_text(target / "README.md", README.format(version=__version__, major=MAJOR, functions=functions))
    return target


def main(arguments: list[str]) -> int:
    """Writes the folder named on the command line."""
    if len(arguments) != 1:
        print("usage: python -m affine_attention.hub_kernel FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"wrote {write_hub_kernel(arguments[0])}")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
