"""Converts a pretrained checkpoint into one with a mechanism that computes the same, as a starting point for training.

    convert("path/to/checkpoint", "path/to/output", "affine")

The mechanism starts as the identity (`hf.attach` with start="identity"). The written folder is loaded again and its
logits are compared with those of the original before it gets its name, so a folder that exists was verified.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ..files import check_new_folder, creating_folder, existing_parent, expanded
from ..hf import attach, is_attached
from ..hf.dropout import remove_attention_dropout
from ..hf.families import find_sites
from ..hf.installation import check_identity, check_start, identity_factor
from ..hf.loading import load_config, load_model, load_tokenizer_of
from ..messages import shown
from ..nn import Mechanism
from ..nn.mechanism import as_mechanism
from .data import read_documents
from .device import choose_device
from .models import without_plain_mechanism

TEXT = "embedded:gutenberg"
ROWS = 2  # sequences of the check: two, so that a mistake between the rows of a batch is seen
TOKENS = 256
OTHER_FILES = 2**24  # bytes for configuration and tokenizer files


@dataclass(frozen=True)
class LogitCheck:
    """The comparison of the written checkpoint with the original."""

    tokens: int
    text: str
    largest: float  # largest difference of a logit
    allowed: float  # what rounding explains, see `_logits_and_rounding`
    same_choice: float  # share of positions with the same most likely token

    @property
    def passed(self) -> bool:
        return self.largest <= self.allowed

    def __str__(self) -> str:
        if self.largest == 0:
            return f"bitwise equal to the original on {self.tokens} tokens of {self.text}"
        return (
            f"differ from the original by at most {self.largest:.3g} on {self.tokens} tokens of {self.text} (rounding "
            f"allows {self.allowed:.3g}); {self.same_choice:.1%} of the most likely tokens are the same"
        )


@dataclass(frozen=True)
class Conversion:
    """What `convert` changed; `str` shows it as lines."""

    source: str
    out: Path
    family: str
    mechanism: Mechanism
    layers: int
    parameters_before: int
    parameters: int
    factor: float  # of the output projections
    projections: tuple[str, ...]  # their names
    dtype: str
    bytes_before: int
    bytes: int
    dropout: dict[str, float]  # settings that were set to 0, with their earlier values
    check: LogitCheck

    def __str__(self) -> str:
        added = self.parameters - self.parameters_before
        lines = [
            f"{self.source} -> {self.out}: {self.family} with {self.mechanism.name}",
            f"  parameters: {self.parameters_before:,} -> {self.parameters:,} (+{added:,}, "
            f"{added / self.parameters_before:.3%}), {added // self.layers:,} in each of {self.layers} layers",
        ]
        if self.factor != 1:
            lines.append(
                f"  output projections multiplied by {self.factor:g}: {self.projections[0]} .. {self.projections[-1]}"
            )
        lines += [f"  {name}: {value:g} -> 0, no mechanism has dropout" for name, value in self.dropout.items()]
        lines += [
            f"  weights: {self.dtype}, {self.bytes_before / 1e6:,.1f} MB -> {self.bytes / 1e6:,.1f} MB",
            f"  logits: {self.check}",
            f"  load: import affine_attention.hf; AutoModelForCausalLM.from_pretrained({str(self.out)!r})",
        ]
        return "\n".join(lines)


def convert(
    checkpoint: str | Path,
    out: str | Path,
    mechanism: Mechanism | str = "affine",
    *,
    tokens: int = TOKENS,
    device: torch.device | str | None = None,
) -> Conversion:
    """Writes a copy of a checkpoint with a mechanism that keeps its logits, and returns what was changed.

    >>> print(convert("HuggingFaceTB/SmolLM2-135M", "smollm2-affine", "affine"))  # doctest: +SKIP

    Nothing is left in `out` unless everything succeeds: it is written under a temporary name, loaded again, compared
    with the original, and then renamed.

    Args:
        checkpoint: a folder that `save_pretrained` wrote, the folder of a finished run, or a name on the hub.
        out: the new folder; it must not exist.
        mechanism: a `Mechanism` or the name of a preset. Mechanisms with a sink cannot start as the identity.
        tokens: how many tokens of text are compared, at least 2. A checkpoint without a tokenizer is compared on random
            tokens.
        device: of the comparison; None uses a GPU if there is one.

    Raises:
        ValueError: the checkpoint is damaged, its family is not served, the identity does not exist for the mechanism
            or the family, or the logits of the written checkpoint differ from those of the original.
        OSError: `out` exists, or its disk is too small.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise ValueError(f"tokens must be an integer of at least 2, got {shown(tokens)}")
    mechanism, target, chosen = as_mechanism(mechanism), expanded(out, "out"), choose_device(device)
    check_new_folder(target)
    check_start(mechanism, "identity")
    added = _check_served(checkpoint, mechanism)
    _check_space(checkpoint, target, added)
    model = without_plain_mechanism(load_model(checkpoint, "checkpoint")).eval()
    tokenizer = load_tokenizer_of(checkpoint, "checkpoint")
    parameters_before, bytes_before = _sizes(model)
    text, ids = _inputs(model, tokenizer, tokens)
    model = model.to(chosen)
    before, allowed = _logits_and_rounding(model, ids)
    dropout = remove_attention_dropout(model)
    attach(model, mechanism, start="identity")
    names = tuple(f"{site.name}.{_name_of(site.module, site.out_proj)}" for site in find_sites(model))
    with creating_folder(target) as folder:
        try:
            model.cpu().save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        except OSError as error:
            free = shutil.disk_usage(existing_parent(target)).free
            raise OSError(f"{target} could not be written: {error} ({free:,} bytes free on its disk)") from error
        del model
        written = load_model(folder, "the converted checkpoint").to(chosen).eval()
        check = _compare(before, _logits(written, ids), allowed, text)
        if not check.passed:
            raise ValueError(f"{target} was not written: the logits of the converted {checkpoint} {check}")
        parameters, size = _sizes(written)
    return Conversion(
        source=str(checkpoint), out=target, family=type(written).plain_class.__name__, mechanism=mechanism,
        layers=len(names), parameters_before=parameters_before, parameters=parameters,
        factor=identity_factor(mechanism), projections=names, dtype=str(written.dtype).removeprefix("torch."),
        bytes_before=bytes_before, bytes=size, dropout=dropout, check=check,
    )  # fmt: skip


def _check_served(checkpoint: str | Path, mechanism: Mechanism) -> int:
    """Raises before weights are read if the mechanism cannot be attached; returns the bytes of its parameters.

    The configuration of a hub name that is not in the local cache is not known yet: `attach` checks it later.
    """
    try:
        config = load_config(checkpoint, "checkpoint")
    except OSError:
        return 0
    with torch.device("meta"):
        model = without_plain_mechanism(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
        if is_attached(model):
            name = config.affine_attention["mechanism"]["name"]
            raise ValueError(f"checkpoint {str(checkpoint)!r} already has a mechanism ({name!r}); convert its original")
        sites = find_sites(model)
        check_identity(sites)
    each = [mechanism.extra_parameters(site.embed_dim, site.num_heads, site.head_dim) for site in sites]
    return 4 * sum(each)


def _check_space(checkpoint: str | Path, target: Path, added: int) -> None:
    folder = Path(checkpoint)
    if (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    needed = sum(path.stat().st_size for path in folder.glob("*.safetensors")) + added + OTHER_FILES
    free = shutil.disk_usage(existing_parent(target)).free
    if needed > free:
        raise OSError(
            f"the disk of {target} has {free:,} bytes free, but the converted checkpoint needs about {needed:,}; free "
            "some space, or choose another folder"
        )


def _inputs(model: Any, tokenizer: Any, tokens: int) -> tuple[str, Tensor]:
    """(what the tokens are, ids [ROWS, T]); random tokens if there is no tokenizer or its text is too short."""
    config = model.config.get_text_config()
    rows = min(ROWS, tokens // 2)
    length = tokens // rows
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        length = min(length, positions)
    if tokenizer is not None:
        text = next(iter(read_documents(TEXT)))
        ids = tokenizer(text[: 16 * rows * length], verbose=False)["input_ids"][: rows * length]
        if len(ids) == rows * length and max(ids) < config.vocab_size:
            return f"the text {TEXT}", torch.tensor(ids).view(rows, length)
    generator = torch.Generator().manual_seed(0)
    return "random ids", torch.randint(config.vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids.to(next(model.parameters()).device), use_cache=False).logits
    return logits.float().cpu()


def _logits_and_rounding(model: Any, ids: Tensor) -> tuple[Tensor, float]:
    """The logits of the original, and the difference that rounding may cause.

    The yardstick is the original itself: its logits with eager and with its usual attention differ by rounding alone.
    The converted model may differ by twice that, and by one rounding of the largest logit per layer if the family has
    only one implementation.
    """
    logits = _logits(model, ids)
    usual = model.config._attn_implementation
    rounding = float(logits.abs().max()) * torch.finfo(model.dtype).eps
    if usual == "eager":
        return logits, rounding * model.config.get_text_config().num_hidden_layers
    model.set_attn_implementation("eager")
    other = _logits(model, ids)
    model.set_attn_implementation(usual)
    return logits, max(2 * float((logits - other).abs().max()), rounding)


def _compare(before: Tensor, after: Tensor, allowed: float, text: str) -> LogitCheck:
    finite = torch.isfinite(before)
    if not bool((finite == torch.isfinite(after)).all()):
        largest = float("inf")
    else:
        largest = float((before - after)[finite].abs().max()) if bool(finite.any()) else float("inf")
    same = (before.argmax(-1) == after.argmax(-1)).float().mean()
    return LogitCheck(before.shape[0] * before.shape[1], text, largest, allowed, float(same))


def _sizes(model: Any) -> tuple[int, int]:
    """(number of parameters, bytes of parameters and buffers that a checkpoint holds)."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(p.numel() for p in model.parameters()), sum(t.numel() * t.element_size() for t in tensors.values())


def _name_of(module: Any, part: Any) -> str:
    return next(name for name, child in module.named_children() if child is part)
