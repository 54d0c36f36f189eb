"""Turns parts of a sequence into parts of the heads and back, so that ranks share the attention of one long sequence.

Ulysses sequence parallelism: each of P ranks holds T/P consecutive tokens of every row. Around the operator one
all-to-all turns query, key, value, alpha, beta and gate from [B, H, T/P, ..] into [B, H/P, T, ..], and another turns
the output back. Everything else in a model works on single tokens and needs no communication. alpha is collected where
its tokens are, so that `commit_running_alpha` over all ranks sees each token once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..messages import shown
from ..ops import attention
from .attention import AttentionMechanism, Coefficients, subtract_next
from .self_attention import default_positions


class _AllToAll(torch.autograd.Function):
    """Row r of [P, n] goes to rank r, and row r of the output comes from it; the backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, rows_PN: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        received_PN = torch.empty_like(rows_PN)
        dist.all_to_all_single(received_PN, rows_PN, group=group)
        return received_PN

    @staticmethod
    def backward(ctx: Any, grad_PN: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad_PN.contiguous(), ctx.group), None


def _all_to_all(rows_PN: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received_PN: Tensor = _AllToAll.apply(rows_PN, group)  # type: ignore[no-untyped-call]
    return received_PN


class SequenceGroup:
    """The ranks that hold the parts of one sequence, in the order of the parts.

    Args:
        group: a process group, or a device mesh of one dimension; None means all ranks.
    """

    def __init__(self, group: Any = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "group needs torch.distributed, which is not initialized; start the ranks with torchrun and call "
                "torch.distributed.init_process_group()"
            )
        if isinstance(group, dist.DeviceMesh):
            if group.ndim != 1:
                raise ValueError(
                    f"group must be a process group or a device mesh of 1 dimension, got a mesh of {group.ndim} "
                    f'dimensions; pass one of them, mesh["{(group.mesh_dim_names or ("sequence",))[-1]}"]'
                )
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group, a device mesh of 1 dimension, or None for all ranks, got "
                f"{shown(group)}; a rank passes a group that it belongs to"
            )
        self.group: dist.ProcessGroup | None = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        return self  # a copy of a model talks to the same ranks

    def check_heads(self, num_heads: int) -> None:
        if num_heads % self.size:
            raise ValueError(
                f"the query heads must be a multiple of the ranks of group, got {num_heads} heads and {self.size} "
                f"ranks; pass a group of {' or '.join(map(str, _divisors(num_heads)))} ranks"
            )

    def own(self, whole: Tensor, name: str = "sequence") -> Tensor:
        """This rank's part of the last dimension [.., T]."""
        length = whole.shape[-1]
        if length % self.size or not length:
            longer = (length // self.size + 1) * self.size
            raise ValueError(
                f"{name} must have a length that the {self.size} ranks of group divide, got {length}; pad it to "
                f"{longer} and mask the padding (a tokenizer takes pad_to_multiple_of={self.size})"
            )
        part = length // self.size
        return whole[..., self.rank * part : (self.rank + 1) * part]

    def agree(self, device: torch.device, **sizes: int) -> None:
        """Raises on every rank where a size differs between the ranks; unequal parts would hang the exchange."""
        mine = torch.tensor(list(sizes.values()), device=device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        table = torch.stack(parts).T.tolist()
        for name, values in zip(sizes, table, strict=True):
            if len(set(values)) > 1:
                raise ValueError(
                    f"{name} must be the same on all ranks of group, got {values}; cut every tensor of a batch into "
                    "equal parts (affine_attention.shard_sequence, affine_attention.hf.shard_batch)"
                )

    def gather(self, part: Tensor) -> Tensor:
        """The whole [.., T] of the parts [.., T/P]: integers or booleans, without a gradient."""
        # Some backends exchange no booleans.
        mine = (part.to(torch.uint8) if part.dtype == torch.bool else part).contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return torch.cat(parts, -1).to(part.dtype)

    def to_heads(
        self, query: Tensor, key: Tensor, value: Tensor, coefficients: Coefficients
    ) -> tuple[Tensor, Tensor, Tensor, Coefficients]:
        """Parts of the sequence with all heads to the whole sequence with this rank's heads.

        Where P does not divide the key-value heads, each is repeated until it does; a rank then holds the key-value
        heads of its own query heads.
        """
        self.check_heads(query.shape[1])
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        given = coefficients._asdict()
        by_token = [name for name, x in given.items() if isinstance(x, Tensor) and x.dim() > 2]
        query, key, value, *parts = self._exchange([query, key, value, *(given[name] for name in by_token)])
        # What has no tokens, a sink [H] or the weights of a norm [H, D], is on every rank, which takes its heads.
        heads = query.shape[1]
        own = slice(self.rank * heads, (self.rank + 1) * heads)
        of_heads = {name: x[own] for name, x in given.items() if isinstance(x, Tensor) and name not in by_token}
        rows = Coefficients(**given | of_heads | dict(zip(by_token, parts, strict=True)))
        return query, key, value, rows

    def to_part(self, out: Tensor) -> Tensor:
        """The whole sequence with this rank's heads [B, H/P, T, D] to its part with all heads [B, H, T/P, D]."""
        parts = out.unflatten(2, (self.size, -1)).movedim(2, 0)
        received = _all_to_all(parts.flatten(1).contiguous(), self.group)
        # The heads of a token lie side by side in memory, as some models need where they flatten them by a view.
        out_BTHD = received.view(parts.shape).permute(1, 3, 0, 2, 4).flatten(2, 3).contiguous()
        return out_BTHD.transpose(1, 2)

    def _exchange(self, tensors: list[Any]) -> list[Any]:
        """[B, h, T/P, ..] to [B, h/P, T, ..] for each tensor, in one collective call for each dtype."""
        whole: list[Any] = [None] * len(tensors)
        for dtype in dict.fromkeys(x.dtype for x in tensors if x is not None):
            chosen = [i for i, x in enumerate(tensors) if x is not None and x.dtype == dtype]
            parts = [tensors[i].unflatten(1, (self.size, -1)).movedim(1, 0) for i in chosen]
            rows_PN = torch.cat([part.flatten(1) for part in parts], 1)
            split: Any = _all_to_all(rows_PN, self.group).split([part[0].numel() for part in parts], 1)
            for i, part, received in zip(chosen, parts, split, strict=True):
                whole[i] = received.reshape(part.shape).movedim(0, 2).flatten(2, 3)
        return whole

    def own_divisor(self, layer: AttentionMechanism, query: Tensor, key: Tensor, **visible: Any) -> Tensor | int | None:
        """N of Eq. 8 for this rank's queries, counted over the whole sequence; `visible` is that of the sequence."""
        if not layer.mechanism.bias:
            return None
        # Only their shapes matter: a view of one number has that of the whole sequence.
        query, key = (x.new_empty(1).expand(*x.shape[:2], x.shape[2] * self.size, x.shape[3]) for x in (query, key))
        divisor = layer.bias_divisor(query, key, **visible)
        if isinstance(divisor, Tensor) and divisor.shape[-1] > 1:
            return self.own(divisor)
        return divisor

    def attend(
        self,
        layer: AttentionMechanism,
        hidden: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: dict[str, Any],
        token_mask: Tensor | None,
        softmax_scale: float | None,
        impl: str,
    ) -> Tensor:
        """The operator on this rank's part, with masks and segment ids that are parts too: [B, H, T/P, D]."""
        mask, segment_ids = visible["mask"], visible["segment_ids"]
        if mask is not None and mask.dim() != 2:
            raise ValueError(
                f"mask must have shape [B, T] under sequence parallelism, this rank's part of the keys, got "
                f"{list(mask.shape)}; use segment_ids, window or is_causal for pairs"
            )
        if isinstance(segment_ids, tuple) or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"key must have as many tokens as query under sequence parallelism, got {key.shape[2]} and "
                f"{query.shape[2]} with segment_ids of type {type(segment_ids).__name__}; caches and cross-attention "
                "are not served: remove() the handle of sequence_parallel to generate"
            )
        if layer.observer is not None:
            raise ValueError("observer is not served under sequence parallelism; inspect the model on one rank")
        token_mask = mask if token_mask is None else token_mask
        mask, segment_ids = self._gather_visible(query, mask, segment_ids)
        visible = visible | {"mask": mask, "segment_ids": segment_ids}
        rows = layer.rows(hidden, self.own_divisor(layer, query, key, **visible), token_mask)
        num_kv_heads = key.shape[1]  # to_heads may repeat them
        difference = layer.difference(hidden, num_kv_heads)
        query, key, softmax_scale = layer.scored(query, key, softmax_scale)
        query, key, value, rows = self.to_heads(query, key, value, rows)
        out = self.to_part(
            attention(
                query, key, value, **rows._asdict(), **visible, softmax_scale=softmax_scale,
                nonnegative_alpha=layer.nonnegative_alpha, impl=impl,
            )
        )  # fmt: skip
        return out if difference is None else subtract_next(out, difference, num_kv_heads)

    def positions(self, query: Tensor, mask: Tensor | None, segment_ids: Tensor | None) -> Tensor:
        """The default positions of this rank's tokens: those that one rank would give them."""
        whole = query[:, :, :1].expand(-1, -1, query.shape[2] * self.size, -1)
        if mask is not None or segment_ids is not None:
            mask, segment_ids = self._gather_visible(query, mask, segment_ids)
        return self.own(default_positions(whole, mask, segment_ids, 0))

    def _gather_visible(
        self, query: Tensor, mask: Tensor | None, segment_ids: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        self.agree(
            query.device,
            batch=query.shape[0],
            length_of_the_part=query.shape[2],
            has_mask=mask is not None,
            has_segment_ids=segment_ids is not None,
        )
        return tuple(None if x is None else self.gather(x) for x in (mask, segment_ids))  # type: ignore[return-value]


class SequenceHandle:
    """What `sequence_parallel` returns: `remove()` gives the model back its whole sequences."""

    def __init__(self, sequence: SequenceGroup, undo: list[Callable[[], Any]]):
        self.sequence = sequence
        self._undo = undo

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()


def sequence_parallel(model: nn.Module, group: Any = None) -> SequenceHandle:
    """Makes the attention layers of a model work on sequences whose parts are held by the ranks of a group.

    From now on every rank calls the model with its own part of the same rows, as `shard_sequence` cuts them: hidden
    states, mask, segment ids and positions, [B, T/P, ..] each. Losses and gradients of the ranks then add up to those
    of the whole sequence, so reduce gradients over all ranks, those of the group included (DDP and FSDP average:
    multiply a summed loss by the number of ranks). `commit_running_alpha(model)` needs no group.

    Args:
        model: a module with `SelfAttention` or `AttentionMechanism` inside. For an attached transformers model use
            `affine_attention.hf.sequence_parallel`.
        group: a process group or a device mesh of one dimension that this rank belongs to; None means all ranks. Its
            size must divide the query heads.
    """
    sequence = SequenceGroup(group)
    layers = [module for module in model.modules() if isinstance(module, AttentionMechanism)]
    if not layers:
        raise ValueError(
            f"model must have an AttentionMechanism or SelfAttention inside, got {type(model).__name__} without one"
        )
    for layer in layers:
        sequence.check_heads(layer.num_heads)
        if layer.sequence is not None:
            raise ValueError(
                f"model is sequence-parallel already, over ranks {list(layer.sequence.ranks)}; call remove() of the "
                "handle that sequence_parallel returned first"
            )
        if layer.scale is not None and layer.scale.shard_mesh is not None:
            raise ValueError(
                "model must hold all heads on each rank, but tensor parallelism has split them; sequence parallelism "
                "splits the heads itself: load the model without tp_size"
            )
    for layer in layers:
        _set(layer, sequence)
    return SequenceHandle(sequence, [functools.partial(_set, layer, None) for layer in layers])


def _set(layer: AttentionMechanism, sequence: SequenceGroup | None) -> None:
    layer.sequence = sequence
    if layer.scale is not None:
        layer.scale.sequence_ranks = None if sequence is None else sequence.ranks


def shard_sequence(whole: Tensor, group: Any = None, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that all ranks of the group hold: equal, consecutive parts along `dim`.

    >>> hidden = shard_sequence(hidden, group)  # [B, T, M] to [B, T/P, M]

    Labels must be shifted before they are cut: the last token of a part predicts the first of the next.
    """
    sequence = SequenceGroup(group)
    if not isinstance(whole, Tensor):
        raise TypeError(f"whole must be a tensor, got {type(whole).__name__}")
    if not -whole.dim() <= dim < whole.dim():
        raise ValueError(f"dim must be a dimension of whole {list(whole.shape)}, got {shown(dim)}")
    return sequence.own(whole.movedim(dim, -1), "whole").movedim(-1, dim)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
