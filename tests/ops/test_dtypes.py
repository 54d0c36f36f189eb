"""The dtypes of row quantities and sums."""

import torch

from affine_attention.ops.dtypes import row_dtype, sum_dtype


def test_sums_are_wider_than_the_inputs():
    assert [row_dtype(t) for t in (torch.bfloat16, torch.float16, torch.float32)] == [torch.float32] * 3
    assert row_dtype(torch.float64) == torch.float64
    assert [sum_dtype(t) for t in (torch.bfloat16, torch.float16)] == [torch.float32] * 2
    assert [sum_dtype(t) for t in (torch.float32, torch.float64)] == [torch.float64] * 2
