"""The equation as operators that ONNX has, for torch.onnx.export(dynamo=True).

ONNX has no attention kernel with a log-sum-exp, so the weights [B, H, T, S] are written out, as PyTorch's own attention
is in ONNX. Keys with NaN or infinity are not shielded from queries that do not see them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .call import AttentionCall
from .dtypes import row_dtype
from .reference import reference_weights


def is_exporting_to_onnx() -> bool:
    """True while torch.onnx.export traces a model."""
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()


def onnx_attention(call: AttentionCall) -> Tensor:
    """F1 to F4 of ops/reference.py: the output [B, H, T, D] in the dtype of query."""
    dtype, (heads, groups) = row_dtype(call.query.dtype), (call.query.shape[1], call.value.shape[1])
    value_BHSD = call.value.repeat_interleave(heads // groups, dim=1) if heads != groups else call.value
    out_BHTD = reference_weights(call) @ value_BHSD.to(dtype)
    if call.rows.gate is not None:
        out_BHTD = call.rows.gate.to(dtype) * out_BHTD
    return out_BHTD.to(call.query.dtype)
