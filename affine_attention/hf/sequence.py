"""Runs an attached transformers model on sequences whose parts are held by several ranks.

The decoder sees this rank's tokens only. Before it runs, `note_sequence` gathers the padding and the packed
documents of the whole sequence, gives the decoder the positions of its own part, and passes the layers a
`SequenceCall` instead of a `ForwardCall`: it reads masks for the whole sequence, and the attention function of
interface.py exchanges parts for heads around the operator.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import nn as layers_of_nn
from ..nn import AttentionMechanism, SequenceHandle
from ..nn.ulysses import SequenceGroup
from .classes import AffineModelMixin
from .composite import decoder_config
from .families import find_decoders, find_sites
from .interface import ForwardCall, Reading, by_name
from .masks import KEY_CODE, SEGMENT_CODE, SEQUENCE_RANKS, packed_segments
from .token_mixing import changing_rope, counts_positions, mixes_tokens

IGNORED = -100  # a label that has no loss
SLOT = "_affine_sequence"  # where a decoder keeps its SequenceGroup
CUT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")


class SequenceCall(ForwardCall):
    """A `ForwardCall` whose readings are those of the whole sequence, with the rows of this rank."""

    __slots__ = ("keep", "segments", "sequence")

    def __init__(self, config: Any, sequence: SequenceGroup, keep: Tensor | None, segments: Tensor | None):
        super().__init__(config)
        self.sequence = sequence
        self.keep = keep  # [B, T], True for real tokens; None: all
        self.segments = segments  # [B, T]

    def make(
        self,
        layer: AttentionMechanism,
        mask: Tensor | None,
        query: Tensor,
        key: Tensor,
        is_causal: bool,
        segments: Tensor | None,
    ) -> Reading:
        if mask is not None and mask.dtype not in (KEY_CODE, SEGMENT_CODE):
            raise ValueError(
                f"the mask of {type(self.config).__name__} must be causal, with a window, padding and packed documents "
                f"at most, under sequence parallelism, got a mask of pairs {list(mask.shape)}; run it on one rank"
            )
        if not is_causal or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"attention must be causal over the tokens of the call under sequence parallelism, got "
                f"is_causal={is_causal}, {query.shape[2]} queries and {key.shape[2]} keys; run it on one rank"
            )
        arguments: dict[str, Any] = {"is_causal": True}
        if mask is not None and mask.shape[1] > 1:
            arguments["window"] = mask.shape[1] - 1
        if self.keep is not None:
            arguments["mask"] = self.keep
        if self.segments is not None:
            arguments["segment_ids"] = self.segments
        token_mask = None if self.keep is None else self.sequence.own(self.keep)
        divisor = self.sequence.own_divisor(layer, query, key, **arguments)
        return Reading(arguments, key.shape[2], token_mask, divisor)


def sequence_parallel(model: PreTrainedModel, group: Any = None) -> SequenceHandle:
    """Makes an attached model work on sequences whose parts are held by the ranks of a group.

    >>> handle = hf.sequence_parallel(model, group)
    >>> loss = model(**hf.shard_batch(batch, group)).loss

    Every rank calls the model with its part of the same rows, in training and evaluation. The mean of the losses over
    all ranks is the loss of the whole batch, and the mean of the gradients its gradient: what DDP and FSDP compute.
    Logits and hidden states are those of the part. `commit_running_alpha(model)` needs no group.

    Args:
        model: a causal language model or its decoder, after `attach` and before DDP, FSDP or torch.compile.
        group: a process group or a device mesh of one dimension that this rank belongs to; None means all ranks. Its
            size must divide the query heads; key-value heads are repeated where it does not divide them.

    Returns:
        A handle; its `remove()` makes the model take whole sequences again, to generate for instance.
    """
    if not isinstance(model, AffineModelMixin):
        raise TypeError(
            f"model must be an attached transformers model, got {type(model).__name__}; call "
            "affine_attention.hf.attach(model, mechanism) first, and sequence_parallel before DDP or torch.compile"
        )
    sites = find_sites(model)
    decoders = find_decoders(model, sites)
    reason = _unserved(model, decoders, len(sites))
    if reason is not None:
        raise ValueError(f"model {type(model).__name__} cannot be sequence-parallel: {reason}")
    handle = layers_of_nn.sequence_parallel(model, group)
    undo: list[Any] = handle._undo
    for decoder in decoders:
        decoder.__dict__[SLOT] = handle.sequence
        setattr(decoder.config, SEQUENCE_RANKS, handle.sequence.size)
        undo.append(functools.partial(decoder.__dict__.pop, SLOT))
        undo.append(functools.partial(decoder.config.__dict__.pop, SEQUENCE_RANKS))
        undo.append(decoder.register_forward_pre_hook(note_sequence, with_kwargs=True).remove)
    undo.append(model.register_forward_pre_hook(check_labels, with_kwargs=True).remove)
    return handle


def is_sequence_parallel(model: nn.Module) -> bool:
    return any(SLOT in module.__dict__ for module in model.modules())


def shard_batch(batch: dict[str, Any], group: Any = None) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of the group hold, ready for `model(**part)`.

    Args:
        batch: `input_ids` or `inputs_embeds`, and any of `attention_mask`, `position_ids` (they restart where documents
            are packed) and `labels`, not shifted: [B, T] each. T must be a multiple of the ranks.
        group: as in `sequence_parallel`.

    Returns:
        The parts; `position_ids` where the batch had none; and for labels, `shift_labels` (shifted before the cut, so
        that the last token of a part predicts the first of the next) and `num_items_in_batch`, the labels of the whole
        batch divided by the ranks, so that the *mean* of the losses over the ranks is the loss of the batch.
    """
    sequence = SequenceGroup(group)
    given = {name: x for name, x in dict(batch).items() if x is not None}
    unknown = sorted(set(given) - set(CUT))
    if unknown:
        raise ValueError(
            f"batch must hold {', '.join(CUT)} only, got {', '.join(map(repr, unknown))}, which sequence parallelism "
            "does not cut; take it out of the batch"
        )
    tokens = given.get("input_ids", given.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        raise ValueError(f"batch must hold input_ids [B, T] as a tensor, got {sorted(given)}")
    length = tokens.shape[1]
    if "position_ids" not in given:
        given["position_ids"] = torch.arange(length, device=tokens.device)[None]
    for name in ("attention_mask", "position_ids", "labels"):
        x = given.get(name)
        if x is not None and not (isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == length):
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{name} must be a tensor of 2 dimensions [B, T], with T = {length} as input_ids, got {shape}"
            )
    labels = given.get("labels")
    if labels is not None:
        given["shift_labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    part = {name: sequence.own(x.movedim(1, -1), name).movedim(-1, 1).contiguous() for name, x in given.items()}
    if labels is not None:
        part["num_items_in_batch"] = (given["shift_labels"] != IGNORED).sum() / sequence.size
    return part


def note_sequence(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Before a decoder, after `note_call`: gathers masks and documents of the whole sequence for its layers."""
    sequence: SequenceGroup = module.__dict__[SLOT]
    if torch.compiler.is_compiling():
        raise ValueError("torch.compile is not served under sequence parallelism; call the model uncompiled")
    given = kwargs | by_name(module, args)
    if kwargs.get("affine_weights"):
        raise ValueError("output_attentions=True is not served under sequence parallelism; run the model on one rank")
    if given.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values cannot be used under sequence parallelism; call remove() of the handle that "
            "sequence_parallel returned, then generate"
        )
    inputs = given.get("input_ids")
    inputs = given.get("inputs_embeds") if inputs is None else inputs
    if not isinstance(inputs, Tensor):
        raise ValueError("input_ids must be a tensor [B, T] under sequence parallelism, this rank's part of the tokens")
    batch, length = inputs.shape[:2]
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    for name, x in (("attention_mask", mask), ("position_ids", positions)):
        if x is not None and not (isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == length):
            shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{name} must have shape [B, T] = [{batch}, {length}] under sequence parallelism, this rank's part as "
                f"hf.shard_batch cuts it, got {shape}"
            )
    sequence.agree(
        inputs.device,
        batch=batch,
        length_of_the_part=length,
        has_attention_mask=mask is not None,
        has_position_ids=positions is not None,
    )
    keep = segments = None
    if mask is not None:
        keep = sequence.gather(mask.bool())
        keep = None if bool(keep.all()) else keep
    elif positions is not None:
        # Transformers takes restarting positions for packed documents where it is given no mask.
        segments = packed_segments(sequence.gather(positions.expand(batch, -1)), batch)
        segments = segments if bool(segments[:, -1].any()) else None
    if positions is None:
        given["position_ids"] = sequence.own(torch.arange(length * sequence.size, device=inputs.device)[None])
    given["attention_mask"] = None
    if "use_cache" in inspect.signature(type(module).forward).parameters:
        given["use_cache"] = False
    given["affine_segments"] = None
    given["affine_call"] = SequenceCall(module.config, sequence, keep, segments)
    return (), given


def check_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model: labels that are shifted inside a part would lose the label at each cut."""
    given = kwargs | by_name(module, args)
    missing = [name for name in ("shift_labels", "num_items_in_batch") if given.get(name) is None]
    if given.get("labels") is not None and missing:
        raise ValueError(
            f"labels need {' and '.join(missing)} under sequence parallelism: a label at the end of a part belongs to "
            "the next part, and the mean is over the whole batch; make them with affine_attention.hf.shard_batch"
        )


def _unserved(model: Any, decoders: list[PreTrainedModel], sites: int) -> str | None:
    """Why a model cannot be cut into parts, None where it can."""
    config = model.config
    if decoder_config(config) is not config:
        return "it is multimodal: images become tokens inside the model, after the batch was cut"
    if model not in decoders and model.get_output_embeddings() is None:
        return "its head works on whole sequences; use a ...ForCausalLM model or the decoder alone"
    if getattr(config, "output_router_logits", False):
        return (
            "the loss of its router is computed from whole sequences (output_router_logits=True); set it to False in "
            "the configuration"
        )
    if getattr(model, "_tp_size", None):
        return f"its heads are split by tensor parallelism (tp_size={model._tp_size}); load it without tp_size"
    for decoder in decoders:
        if counts_positions(decoder):
            return (
                "it computes positions itself, from the tokens or the mask of a call, and each rank sees its part only"
            )
        reason = mixes_tokens(decoder)
        if reason is not None:
            return reason
        rope = changing_rope(decoder)
        if rope is not None:
            return f"{rope[0]} has rope_type={rope[1]!r}: frequencies depend on the length that a rank sees"
    layers = getattr(config, "num_hidden_layers", sites)
    if sites != layers:
        return f"{sites} of its {layers} layers have a mechanism; the others may mix tokens in another way"
    return None
