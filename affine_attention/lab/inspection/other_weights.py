"""The statistics of rows whose weights are not a softmax: other functions of the scores, and differences of heads.

They are computed from the weights of a block, where metrics.py uses the softmax's own sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.weights import FUNCTIONS


def weigh(name: str, scores_RTS: Tensor, seen_RTS: Tensor, seen_keys_RT: Tensor) -> Tensor:
    """The weights p of a function of `ops/weights` for a block that contains all visible keys of its rows."""
    scores = scores_RTS.masked_fill(~seen_RTS, 0)[None]
    counts = seen_keys_RT.clamp(min=1)[None, ..., None].to(scores.dtype)
    return FUNCTIONS[name].weigh(scores, seen_RTS[None], counts)[0].masked_fill(~seen_RTS, 0)


def minus_next(of_heads: Tensor, difference: Tensor) -> Tensor:
    """For the query heads of one key-value head, along the first dimension (`subtract_next` of nn)."""
    return of_heads - difference * of_heads.roll(-1, 0)


def of_signed(weights_RTS: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row sum, absolute sum, share of negative weights and entropy of abs(w) / sum abs(w), from weights of any sign."""
    sizes = weights_RTS.abs()
    absolute_RT = sizes.sum(-1)
    whole_RT = absolute_RT.clamp(min=torch.finfo(absolute_RT.dtype).tiny)
    negative_RT = weights_RTS.clamp(max=0).sum(-1).neg() / whole_RT
    entropy_RT = whole_RT.log() - torch.xlogy(sizes, sizes).sum(-1) / whole_RT
    return weights_RTS.sum(-1), absolute_RT, negative_RT, entropy_RT.masked_fill(absolute_RT == 0, torch.nan)


def other_rows(
    name: str,
    scores_RTS: Tensor,
    seen_RTS: Tensor,
    seen_keys_RT: Tensor,
    first_key_T: Tensor,
    alpha_RT: Tensor,
    beta_RT: Tensor | None,
    difference_RT: Tensor | None,
) -> Tensor:
    """The statistics [9, R, rows] of metrics.Rows for a function other than softmax.

    `entropy_softmax` is the entropy of abs(p) / sum abs(p) here.

    Args:
        first_key_T: the first key of each row's document as an index of the block, negative if it is not in it.
    """
    p_RTS = weigh(name, scores_RTS, seen_RTS, seen_keys_RT)
    scaled_RTS = alpha_RT[..., None] * p_RTS
    weights_RTS = scaled_RTS
    if beta_RT is not None:
        weights_RTS = (scaled_RTS + beta_RT[..., None]).masked_fill(~seen_RTS, 0)
    if difference_RT is not None:
        scaled_RTS, weights_RTS = (minus_next(x, difference_RT[..., None]) for x in (scaled_RTS, weights_RTS))
    inside_T = (first_key_T >= 0) & (first_key_T < scores_RTS.shape[-1])
    index_RT1 = first_key_T.clamp(0, max(scores_RTS.shape[-1] - 1, 0))[None, :, None].expand(len(scores_RTS), -1, 1)

    def at_first(x_RTS: Tensor) -> Tensor:
        return x_RTS.gather(-1, index_RT1).squeeze(-1) * inside_T

    row_sum_RT, absolute_RT, negative_RT, entropy_RT = of_signed(weights_RTS)
    uniform_RT = at_first(seen_RTS.to(p_RTS.dtype).expand_as(p_RTS)) / seen_keys_RT.clamp(min=1)
    return torch.stack(
        [row_sum_RT, absolute_RT, negative_RT, at_first(weights_RTS), at_first(scaled_RTS), scaled_RTS.sum(-1),
         uniform_RT, of_signed(p_RTS)[3].nan_to_num(0.0), entropy_RT]
    )  # fmt: skip
