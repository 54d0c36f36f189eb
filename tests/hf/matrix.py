"""Writes docs/hf-matrix.md: which feature works for which family and mechanism, tested on tiny models.

    python -m tests.hf.matrix [--families llama gpt2] [--mechanisms affine sink] [--write]

A feature is a function that raises if the feature does not work. The test suite covers each with more cases. Thirteen
families run with eight mechanisms and every feature, all other causal families of transformers with two mechanisms and
without compilation, multimodal families with the tests of test_composite.py.
"""

from __future__ import annotations

import argparse
import copy
import logging
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, StaticCache

from affine_attention import Mechanism
from affine_attention.hf import attach, detach
from affine_attention.nn import PRESETS

from . import test_composite
from .models import FAMILIES, make_model, make_tokens, mechanisms, oracle, plain_model
from .multimodal import MULTIMODAL
from .test_attach import EXACT, loss_and_gradients
from .test_classes import assert_same
from .test_generation import batched, each, full_forward_tokens, prompts
from .test_masks import packed_positions, padded_rows, run_real
from .test_training import assert_same_state, train
from .tiny import CAUSAL, NotBuilt, published_shapes, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "hf-matrix.md"
EIGHT = list(PRESETS)[:8]  # the mechanisms of the paper and its controls
TWO = ["affine_gated", "sink"]  # between them: alpha, bias, running average, gate and sink
LONGEST_CELL = 120  # seconds
COUNT_MASKS = ("opt", "biogpt", "afmoe")
# Norms, rotary tables and state-space layers of many families compute in fp32 in a model of fp64, so a difference of
# 1e-16 in attention can become one of fp32's rounding. A wrong mask or gate changes the second digit.
FP32_INSIDE = 1e-5


class NotApplicable(Exception):
    """The combination does not exist; the message says why."""


def settings(mechanism: str) -> Mechanism:
    return Mechanism.named(mechanism, bias_length=6, running_alpha_start=0.4)


def single(family: str, mechanism: str | None, dtype: torch.dtype = torch.float32) -> Any:
    """A model with a mechanism; without a name the plain model, which shows what the family itself can do."""
    return plain_model(family, dtype) if mechanism is None else make_model(family, settings(mechanism), dtype)


def double(family: str, mechanism: str | None) -> Any:
    return single(family, mechanism, torch.float64)


def close(family: str, mine: Any, truth: Any) -> None:
    """Tensors equal within fp64's rounding, or within fp32's of their largest entry where a family computes in fp32."""
    if family in FAMILIES:
        torch.testing.assert_close(mine, truth, **EXACT)
        return
    if isinstance(mine, torch.Tensor):
        largest = max(1.0, float(truth.detach().abs().max()))
        torch.testing.assert_close(mine / largest, truth / largest, rtol=0, atol=FP32_INSIDE)
        return
    keys = mine.keys() if isinstance(mine, dict) else range(len(mine))
    assert len(mine) == len(truth)
    for key in keys:
        close(family, mine[key], truth[key])


def against_oracle(family: str, model: Any, **inputs: Any) -> None:
    mine = loss_and_gradients(model, **inputs)
    with oracle():
        truth = loss_and_gradients(model, **inputs)
    close(family, mine, truth)


def gradients(family: str, mechanism: str | None) -> None:
    """logits and every gradient equal a dense formula in fp64, and every gate gets a gradient"""
    model = double(family, mechanism)
    against_oracle(family, model, input_ids=make_tokens())
    assert all(p.grad is not None for layer in mechanisms(model) for p in layer.parameters())


def padding(family: str, mechanism: str | None) -> None:
    """left and right padding, with gradients, equal the dense formula"""
    model = double(family, mechanism)
    for side in ("left", "right"):
        mine = run_real(model, *padded_rows(side))
        with oracle():
            truth = run_real(model, *padded_rows(side))
        close(family, mine, truth)


def packing(family: str, mechanism: str | None) -> None:
    """documents packed by position_ids, with gradients, equal the dense formula, or each the document alone"""
    if family == "granitemoehybrid":
        raise NotApplicable("its state-space layers mix packed documents, and its masks ignore position_ids")
    model, tokens, places = double(family, mechanism), make_tokens(), packed_positions()
    if family in COUNT_MASKS and mechanism is not None:  # transformers makes their masks without position_ids
        with torch.no_grad():
            alone = [model(document).logits for document in tokens.split([3, 7, 1, 1], 1)]
            close(family, model(tokens, position_ids=places).logits, torch.cat(alone, 1))
        return
    against_oracle(family, model, input_ids=tokens, position_ids=places)


def caches(family: str, mechanism: str | None) -> None:
    """prefill, chunk and single steps through a growing and a preallocated cache equal one forward"""
    model, tokens = double(family, mechanism), make_tokens()
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        for cache in (None, StaticCache(config=model.config, max_cache_len=16)):
            parts, past = [], cache
            for step in tokens.split([5, 1, 4, 1, 1], 1):
                out = model(step, past_key_values=past, use_cache=True)
                parts.append(out.logits)
                past = out.past_key_values
            close(family, torch.cat(parts, 1), whole)


def generation(family: str, mechanism: str | None) -> None:
    """greedy tokens with dynamic, static and no cache, for one prompt and padded batches, equal those of one forward"""
    model, rows = single(family, mechanism), prompts(2)
    told = each(model, rows, 8)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert full_forward_tokens(model, rows, told) == told
    assert each(model, rows, 8, **static) == told
    assert each(model, rows, 8, use_cache=False) == told
    assert batched(model, rows, 8) == told
    assert batched(model, rows, 8, **static) == told


def checkpointing(family: str, mechanism: str | None) -> None:
    """two steps with gradient checkpointing give bitwise equal weights and running averages"""
    plain = single(family, mechanism).train()
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable()
    batches = [padded_rows("left")]
    assert train(plain, batches) == train(checked, batches)
    assert_same_state(plain, checked)


def compilation(family: str, mechanism: str | None) -> None:
    """two steps of the whole model compiled with fullgraph=True equal the eager ones"""
    if family not in FAMILIES:
        raise NotApplicable("run for the first families only")
    eager = single(family, mechanism).train()
    if "num_experts_per_tok" in FAMILIES[family]:
        eager.set_experts_implementation("batched_mm")  # the only one that compiles on a CPU, attached or not
    traced = copy.deepcopy(eager)
    torch._dynamo.reset()
    call = torch.compile(traced, fullgraph=True, backend="aot_eager")
    batches = [(make_tokens(), None)]
    mine, theirs = train(traced, batches, call), train(eager, batches)
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(mine, theirs, strict=True))
    assert_same_state(eager, traced, exact=False)


def saving(family: str, mechanism: str | None) -> None:
    """save_pretrained and from_pretrained give a bitwise equal model, and no weight or buffer is left unset"""
    model = single(family, mechanism)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded, found = AutoModelForCausalLM.from_pretrained(
            folder, experts_implementation="eager", output_loading_info=True
        )
    assert not found["missing_keys"], found["missing_keys"]
    assert not found["unexpected_keys"], found["unexpected_keys"]
    theirs = dict(loaded.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, theirs[name]), name
    assert_same(loaded, model)


def weights(family: str, mechanism: str | None) -> None:
    """output_attentions=True returns the weights of the dense formula"""
    model = double(family, mechanism)
    if mechanism is None:
        model.set_attn_implementation("eager")
    mine = model(make_tokens(), output_attentions=True, use_cache=False).attentions
    with oracle():
        truth = model(make_tokens(), output_attentions=True, use_cache=False).attentions
    mine, truth = ([x for x in given or () if x is not None] for given in (mine, truth))
    assert len(mine) >= max(1, len(mechanisms(model)))
    close(family, tuple(mine), tuple(truth))


def identity(family: str, mechanism: str | None) -> None:
    """start="identity" keeps the logits bitwise equal, and detach restores the plain model"""
    if mechanism is None:
        return
    if PRESETS[mechanism].identity_scale is None:
        raise NotApplicable("it has no identity start")
    plain = plain_model(family)
    model = attach(copy.deepcopy(plain), mechanism, start="identity")
    assert torch.equal(model(make_tokens()).logits, plain(make_tokens()).logits)
    assert_same(detach(model), plain)


FEATURES: tuple[Callable[[str, str], None], ...] = (
    gradients, padding, packing, caches, generation, checkpointing, compilation, saving, weights, identity
)  # fmt: skip
Cells = dict[tuple[str, str, str], str]


def run_cell(feature: Callable[..., None], family: str, mechanism: str | None) -> str:
    """Runs one cell and returns its result: "ok", "- reason", "refused: reason" or the error."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LONGEST_CELL)
    try:
        feature(family, mechanism)
    except NotApplicable as reason:
        return f"- {reason}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1].filename
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return f"refused: {words}" if "/affine_attention/hf/" in where and isinstance(error, ValueError) else words
    finally:
        signal.alarm(0)
    return "ok"


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"a cell may take {LONGEST_CELL} seconds")


def run_family(family: str, mechanisms: list[str]) -> Cells:
    """Runs every cell of a family. What the plain model cannot do either is not applicable."""
    cells: Cells = {}
    for feature in FEATURES:
        plain = None
        for mechanism in mechanisms:
            word = run_cell(feature, family, mechanism)
            if family not in FAMILIES and not word.startswith(("ok", "- ", "refused")):
                plain = run_cell(feature, family, None) if plain is None else plain
                if plain != "ok":
                    word = f"- the plain model fails too: {plain}"
            cells[family, mechanism, feature.__name__] = word
    return cells


def is_served(family: str) -> str:
    """ "served", or why no model of the family has a row of cells."""
    try:
        model = tiny_model(family)
    except NotBuilt as reason:
        try:
            attach(published_shapes(family), "affine")
        except ValueError as error:
            return f"refused: {_reason(error)}"
        except Exception as error:
            return f"not built: {' '.join(str(error).split())[:120]}"
        return f"attaches, no tiny model here: {reason}"
    try:
        attach(model, "affine")
    except ValueError as error:
        return f"refused: {_reason(error)}"
    try:
        plain_model(family)(make_tokens())
    except Exception as error:
        return f"not built: its tiny model does not run plain: {' '.join(str(error).split())[:100]}"
    return "served"


def _reason(error: ValueError) -> str:
    return str(error).split("is not supported: ")[-1]


def run(families: list[str], mechanisms: list[str]) -> tuple[Cells, dict[str, str]]:
    """Runs every family; returns the cells and, for families without any, the reason."""
    cells: Cells = {}
    reasons = {}
    for family in families:
        begin = time.perf_counter()
        verdict = "served" if family in FAMILIES else is_served(family)
        if verdict == "served":
            cells |= run_family(family, mechanisms if family in FAMILIES else [m for m in TWO if m in mechanisms])
        else:
            reasons[family] = verdict
        bad = sum(_is_failure(word) for key, word in cells.items() if key[0] == family)
        print(
            f"{family:22s} {time.perf_counter() - begin:6.1f} s   {bad} failed cells   {reasons.get(family, '')}",
            flush=True,
        )
    return cells, reasons


def run_multimodal(families: list[str]) -> Cells:
    """The tests of test_composite.py as cells."""
    cells: Cells = {}
    for family in families:
        for name, feature in MULTIMODAL_FEATURES.items():
            cells[family, "affine_gated", name] = run_cell(lambda family, _, check=feature: check(family), family, "")
    return cells


def _with_folder(family: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        test_composite.test_a_folder_holds_the_mechanism_and_never_loads_as_plain_softmax(family, Path(folder))


def _both_paddings(family: str) -> None:
    for pad in (0, 3):
        test_composite.test_logits_and_every_gradient_with_an_image_equal_the_oracle(family, pad)


MULTIMODAL_FEATURES: dict[str, Callable[[str], None]] = {
    "gradients": _both_paddings,
    "towers": test_composite.test_only_the_text_decoder_gets_the_mechanism,
    "generation": test_composite.test_greedy_tokens_do_not_depend_on_the_cache,
    "checkpointing": test_composite.test_gradient_checkpointing_changes_nothing,
    "saving": _with_folder,
    "identity": test_composite.test_identity_start_and_detach_are_bitwise_equal,
}


def _is_failure(word: str) -> bool:
    return not word.startswith(("ok", "- ", "refused"))


def _table(cells: Cells, families: list[str], names: list[str]) -> list[str]:
    """A row per family; a cell counts the mechanisms for which the feature works, of those for which it exists."""
    lines = ["| family | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for family in families:
        row = []
        for name in names:
            words = [word for (f, _, n), word in cells.items() if (f, n) == (family, name)]
            possible = sum(not word.startswith(("- ", "refused")) for word in words)
            row.append(f"{words.count('ok')}/{possible}" if possible else "-")
        lines.append(f"| {family} | " + " | ".join(row) + " |")
    return lines


def _notes(cells: Cells, wanted: Callable[[str], bool]) -> list[str]:
    """One line for each family, feature and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for (family, mechanism, name), word in cells.items():
        if wanted(word):
            found.setdefault((family, name, word.removeprefix("- ")), []).append(mechanism)
    return [f"- {f}, {', '.join(which)}, {n}: {_safe(word)}" for (f, n, word), which in found.items()]


def _safe(text: str) -> str:
    return text.replace("|", "/").replace("<", "(").replace(">", ")").replace("`", "'")


def page(cells: Cells, reasons: dict[str, str], mechanisms: list[str], multimodal: Cells | None = None) -> str:
    """The matrix as markdown."""
    names = [feature.__name__ for feature in FEATURES]
    rows = list(dict.fromkeys(family for family, _, _ in cells))
    first, others = [f for f in rows if f in FAMILIES], [f for f in rows if f not in FAMILIES]
    lines = [
        "# Families, mechanisms, features",
        "",
        f"Written by `python -m tests.hf.matrix --write` with transformers {transformers.__version__} and torch "
        f"{torch.__version__.split('+')[0]}; every cell was run on a tiny model of that family. A cell counts the "
        f"mechanisms for which the feature works, of those for which it exists; of {len(mechanisms)} in the first "
        f"table: {', '.join(mechanisms)}; of {len(TWO)} in the second: {', '.join(TWO)}, without compilation.",
        "",
        *(f"- **{feature.__name__}**: {feature.__doc__}" for feature in FEATURES),
        "",
        *_table(cells, first, names),
        "",
        "`identity` does not exist for mechanisms with a sink (off_by_one, sink): see `hf.attach`.",
    ]
    if others:
        lines += [
            "",
            f"## {len(others)} more causal families",
            "",
            *_table(cells, others, [n for n in names if n != "compilation"]),
        ]
    if multimodal:
        shown = list(dict.fromkeys(name for _, _, name in multimodal))
        lines += [
            "", "## Multimodal families", "",
            "A batch with an image, mechanism affine_gated. **towers**: only the text decoder gets the mechanism; the "
            "rest as above.",
            "", *_table(multimodal, list(dict.fromkeys(f for f, _, _ in multimodal)), shown),
        ]  # fmt: skip
    aside = _notes(cells, lambda word: word.startswith("refused") or word.startswith(("- the plain", "- its state")))
    if aside:
        lines += ["", "## Cells that do not apply", "", *aside]
    for title, word in (("Refused by `attach`", "refused: "), ("No row", "")):
        found = {f: r for f, r in reasons.items() if r.startswith("refused: ") == bool(word)}
        if found:
            lines += [
                "",
                f"## {title}",
                "",
                *(f"- {f}: {_safe(r.removeprefix('refused: '))}" for f, r in found.items()),
            ]
    wrong = _notes(cells | (multimodal or {}), _is_failure)
    if wrong:
        lines += ["", "## Failures", "", *wrong]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = list(dict.fromkeys([*FAMILIES, *CAUSAL]))
    parser.add_argument("--families", nargs="+", default=every, choices=[*every, *MULTIMODAL])
    parser.add_argument("--mechanisms", nargs="+", default=EIGHT, choices=list(PRESETS))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    cells, reasons = run([f for f in given.families if f in every], given.mechanisms)
    images = [f for f in MULTIMODAL if given.families == every or f in given.families]
    text = page(cells, reasons, given.mechanisms, run_multimodal(images))
    if given.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
