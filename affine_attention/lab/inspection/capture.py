"""Records the inputs of every attention layer during a model's forward: one `AttentionCall` per layer.

    def observer(call): print(call.layer, call.query.shape, call.alpha)

    with watch(model, observer), torch.no_grad():
        model(input_ids)

The model runs its usual attention implementation; the observer only reads the arguments of the operator. Without an
observer, a layer does one `is None` check, and a compiled graph does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ...nn import AttentionMechanism
from ...ops.validation import check_softmax_scale, check_visibility
from ...ops.visibility import Visibility
from . import metrics


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of the operator in one layer; None if the mechanism or the call has no such argument.

    `token_mask` [B, T] is True for queries that are real tokens, not padding.
    """

    layer: int  # from 0, in the order of the model's modules
    query: Tensor  # [B, H, T, D], after rotary embedding
    key: Tensor  # [B, G, S, D]
    value: Tensor  # [B, G, S, D]
    softmax_scale: float
    alpha: Tensor | None = None  # [B, H, T]
    beta: Tensor | None = None  # [B, H, T]
    sink: Tensor | None = None  # [H] or [B, H, T]
    gate: Tensor | None = None  # [B, H, T, D]
    exclusion: Tensor | float | None = None  # [B, H, T] or a number
    norm_weight: Tensor | None = None  # [H, D]
    weights: str = "softmax"  # the function of the scores
    difference: Tensor | None = None  # [B, H, T]; how much of the next head a head subtracts
    mask: Tensor | None = None  # [B, S] or [B, 1|H, T, S]
    is_causal: bool = False
    window: int | None = None
    segment_ids: Tensor | tuple[Tensor, Tensor] | None = None
    token_mask: Tensor | None = None  # [B, T]

    @cached_property
    def visibility(self) -> Visibility:
        return check_visibility(
            self.query, self.key, mask=self.mask, is_causal=self.is_causal, window=self.window,
            segment_ids=self.segment_ids,
        )  # fmt: skip


Observer = Callable[[AttentionCall], None]


@contextmanager
def watch(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Calls `observer(call)` before each attention call of the model inside the block, in execution order.

    The observer runs without gradients and outside of autocast, so that its own computations have the dtypes it uses.
    It may keep tensors of a call (which keeps their memory allocated), but must not modify them.

    Compiled models run uncompiled inside the block (`torch.compiler.set_stance`); their graphs are used again after it.
    Run the backward outside of the block: with activation checkpointing, a backward inside it would recompute layers
    and call the observer twice. Nothing in the model changes: outputs and running averages are bitwise equal to those
    of a forward without an observer.

    Args:
        model: any model with mechanisms: attached by `affine_attention.hf`, made of `SelfAttention`, wrapped by DDP,
            PEFT or torch.compile.
        observer: a function of an `AttentionCall`. Blocks can be nested; all observers are called.
    """
    layers = mechanism_layers(model)
    if not layers:
        raise ValueError(
            f"model must have a mechanism, got {type(model).__name__} without one; "
            'affine_attention.hf.attach(model, "softmax") adds one without changing its outputs'
        )
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for index, layer in enumerate(layers):
            stack.callback(_restore, layer, layer.__dict__.get("observer"))
            layer.observer = _observe(index, observer, layer.observer)
        yield


def mechanism_layers(model: nn.Module) -> list[AttentionMechanism]:
    """The mechanisms of a model, one per attention layer, in order."""
    return [module for module in model.modules() if isinstance(module, AttentionMechanism)]


def _observe(index: int, observer: Observer, earlier: Callable[..., None] | None) -> Callable[..., None]:
    def observe(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        softmax_scale: float | None,
        token_mask: Tensor | None,
        **rest: Any,
    ) -> None:
        if earlier is not None:
            earlier(query, key, value, softmax_scale=softmax_scale, token_mask=token_mask, **rest)
        mask, queries = rest.get("mask"), query.shape[2]
        if token_mask is None and mask is not None and mask.dim() == 2 and mask.shape[1] >= queries:
            token_mask = mask[:, mask.shape[1] - queries :]
        scale = check_softmax_scale(softmax_scale, query.shape[-1])
        with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
            observer(AttentionCall(index, query, key, value, scale, token_mask=token_mask, **rest))

    return observe


def _restore(layer: AttentionMechanism, before: Callable[..., None] | None) -> None:
    # Deleted, not set to None: the guards of compiled graphs check that the attribute is absent.
    layer.__dict__.pop("observer", None)
    if before is not None:
        layer.observer = before


class Probe:
    """The statistics of a forward that the training log records (Figure 2, saturated alphas and gates).

    >>> with torch.no_grad(), Probe(model) as probe:
    ...     model(input_ids)
    >>> probe.result()["mean_logit"]  # [layer][head]

    Sums stay on the device until `result`; several forwards are averaged over their tokens. The cost is O(T D) per
    layer for causal, windowed and packed attention: no scores are computed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._layers = mechanism_layers(model)
        self._sums: dict[int, dict[str, tuple[Tensor, Tensor]]] = {index: {} for index in range(len(self._layers))}

    def __enter__(self) -> Probe:
        self._stack = ExitStack()
        self._stack.enter_context(watch(self.model, self._observe))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _observe(self, call: AttentionCall) -> None:
        self._add(call, "mean_logit", metrics.logit_sums(
            call.query, call.key, call.visibility, call.softmax_scale, call.token_mask
        ))  # fmt: skip
        rule = self._layers[call.layer].mechanism.alpha_rule
        if call.alpha is not None and rule is not None and rule.limits == (0.0, 1.0):
            self._add(call, "saturated", metrics.share_sums(metrics.is_saturated(call.alpha), call.token_mask))
        if call.gate is not None:
            closed = metrics.is_gate_saturated(call.gate)
            self._add(call, "gate_saturated", metrics.share_sums(closed, call.token_mask))

    def _add(self, call: AttentionCall, name: str, sums: tuple[Tensor, Tensor]) -> None:
        before = self._sums[call.layer].get(name)
        self._sums[call.layer][name] = sums if before is None else (before[0] + sums[0], before[1] + sums[1])

    def result(self) -> dict[str, Any]:
        """`mean_logit` [layer][head], `saturated` and `gate_saturated` [layer], `running_alpha` [layer][head].

        An entry is None if the mechanism has no such part or no layer ran; a number is None if its mean does not exist
        (no token) or is not finite.
        """
        running = [
            layer.scale.running_alpha for layer in self._layers if layer.scale and layer.mechanism.has_running_alpha
        ]
        return {
            "mean_logit": self._means("mean_logit"),
            "saturated": self._means("saturated", over_heads=True),
            "gate_saturated": self._means("gate_saturated", over_heads=True),
            "running_alpha": [each.tolist() for each in running] or None,
        }

    def _means(self, name: str, over_heads: bool = False) -> list[Any] | None:
        layers = [self._sums[index].get(name) for index in sorted(self._sums)]
        if all(each is None for each in layers):
            return None
        means: list[Any] = []
        for sums in layers:
            if sums is None:
                means.append(None)
                continue
            total, count = (each.cpu().double() for each in sums)
            if over_heads:
                total, count = total.sum(), count.sum()
            means.append(metrics.finite_or_none((total / count).tolist()))
        return means
