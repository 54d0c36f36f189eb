"""Reports of compute-sanitizer are classified by the kernel that they name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")
from affine_attention.ops.fused.hopper import backward_kernels

from .sanitize import hand_over_places, is_cudnns, reported_kernels

OUTPUT = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cudnn::fusion::fmha_reduce_head<(bool)1>(const void *, void *)+0x1a0
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f00 and is 3 bytes after the nearest allocation at 0x7e00 of size 16 bytes
========= Invalid __global__ read of size 2 bytes
=========     at epilogue_kernel+0x30 in kernels.py:95
========= Uninitialized __global__ memory read of size 2 bytes
=========     at _copy_cudnns_result+0x90 in sanitize.py:96
========= Warning: Race reported between Read access at cudnn_generated_fort_native_sdpa_kernel0_0+0x1f30
=========     and Write access at cudnn_generated_fort_native_sdpa_kernel0_0+0x2040 [32 hazards]
12 cases ran, forward and backward; 3 of them decoded, too
"""


def test_kernels_are_counted_by_name():
    assert reported_kernels(OUTPUT) == {
        "void cudnn::fusion::fmha_reduce_head<(bool)1>(const void *, void *)": 1,
        "epilogue_kernel": 1,
        "_copy_cudnns_result": 1,
        "cudnn_generated_fort_native_sdpa_kernel0_0": 2,
    }


def test_the_hand_over_of_warps_is_counted_separately():
    head, call = hand_over_places()
    file, line = head.split(":")
    source = Path(backward_kernels.__file__).read_text().splitlines()
    assert source[int(line) - 1].startswith("def gradients_kernel(")
    assert "gl.warp_specialize(" in source[int(call.split(":")[1]) - 1]
    report = f"""
========= Error: Race reported between Read access at gradients_kernel+0xe0 in {head}
=========     and Write access at gradients_kernel+0x2a00 in {call} [2 hazards]
========= Error: Race reported between Read access at gradients_kernel+0x1790 in {file}:1
=========     and Write access at gradients_kernel+0x2a10 in {head} [4 hazards]
"""
    assert reported_kernels(report) == {"hand-over of warps": 3, "gradients_kernel": 1}


def test_only_reports_in_our_kernels_are_failures():
    """A report in our files named after cuDNN is a failure; one in the copy of cuDNN's result is not."""
    assert [kernel for kernel in reported_kernels(OUTPUT) if not is_cudnns(kernel)] == ["epilogue_kernel"]
    assert not reported_kernels("========= ERROR SUMMARY: 0 errors")
