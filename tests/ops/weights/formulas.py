"""Weight functions written again from their sources, row by row: the second oracle, and plain PyTorch in one dtype.

Each takes the scores of one row's visible keys, [n] with n >= 1, and returns their weights.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from affine_attention.ops.dtypes import row_dtype


def signed(scores):
    """Cog Attention (arXiv 2411.07176): the sign of a score times the softmax of absolute scores."""
    return torch.sign(scores) * F.softmax(scores.abs(), dim=-1)


def sigmoid(scores):
    """Sigmoid attention (arXiv 2409.04431): bias -log n."""
    return 1 / (1 + torch.exp(math.log(len(scores)) - scores))


def softplus(scores):
    """LSSAR (arXiv 2501.13428): softplus with the scale log n, l1 norm, ReLU^15 of n a - 1, l1 norm."""
    n = len(scores)
    a = torch.log1p(torch.exp(scores * math.log(n)))
    a = a / a.sum()
    r = torch.relu(n * a - (1 if n > 3 else 0)) ** 15
    return r / r.sum() if r.sum() > 0 else r


def normalized(scores):
    """Normalized attention (arXiv 2005.09561): standardised scores, with 0.001 added to the deviation."""
    if len(scores) == 1:
        return scores * 0
    return (scores - scores.mean()) / (scores.std(unbiased=False) + 0.001)


FORMULAS = {"signed": signed, "sigmoid": sigmoid, "softplus": softplus, "normalized": normalized}


def plain_attention(name, tensors, visible_BHTS, softmax_scale):
    """The output in the dtype of query, from loops over rows."""
    query, key, value = (tensors[each] for each in ("query", "key", "value"))
    heads, repeats = query.shape[1], query.shape[1] // key.shape[1]
    out = []
    for b in range(query.shape[0]):
        for h in range(heads):
            for i in range(query.shape[2]):
                seen = visible_BHTS[b % visible_BHTS.shape[0], h % visible_BHTS.shape[1], i].nonzero().flatten()
                if not len(seen):
                    out.append(query[b, h, i] * 0)
                    continue
                keys, values = key[b, h // repeats, seen], value[b, h // repeats, seen]
                # As models compute a softmax: in fp32, which the power of 15 needs, and back.
                scores = (keys @ query[b, h, i] * softmax_scale).to(row_dtype(query.dtype))
                weights = FORMULAS[name](scores).to(query.dtype)
                if "alpha" in tensors:
                    weights = tensors["alpha"][b, h, i] * weights
                if "beta" in tensors:
                    weights = weights + tensors["beta"][b, h, i]
                row = weights @ values
                out.append(row * tensors["gate"][b, h, i] if "gate" in tensors else row)
    return torch.stack(out).view(query.shape)
