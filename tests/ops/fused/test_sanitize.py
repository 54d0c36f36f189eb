"""Reports of compute-sanitizer are told apart by the kernel that they name."""

from __future__ import annotations

from .sanitize import is_cudnns, reported_kernels

OUTPUT = """
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void cudnn::fusion::fmha_reduce_head<(bool)1>(const void *, void *)+0x1a0
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f00 and is 3 bytes after the nearest allocation at 0x7e00 of size 16 bytes
========= Invalid __global__ read of size 2 bytes
=========     at epilogue_kernel+0x30
========= Warning: Race reported between Read access at cudnn_generated_fort_native_sdpa_kernel0_0+0x1f30
=========     and Write access at cudnn_generated_fort_native_sdpa_kernel0_0+0x2040 [32 hazards]
12 cases ran, forward and backward; 3 of them decoded, too
"""


def test_kernels_are_counted_by_name():
    assert reported_kernels(OUTPUT) == {
        "void cudnn::fusion::fmha_reduce_head<(bool)1>(const void *, void *)": 1,
        "epilogue_kernel": 1,
        "cudnn_generated_fort_native_sdpa_kernel0_0": 2,
    }


def test_only_ours_are_faults():
    assert [kernel for kernel in reported_kernels(OUTPUT) if not is_cudnns(kernel)] == ["epilogue_kernel"]
    assert not reported_kernels("========= ERROR SUMMARY: 0 errors")
