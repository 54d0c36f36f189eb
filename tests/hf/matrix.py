"""Writes docs/hf-matrix.md: which feature works for which family and mechanism, tested on tiny models.

    python -m tests.hf.matrix [--families llama gpt2] [--mechanisms affine sink] [--write]

A feature is a function that raises if the feature does not work. The test suite covers each with more cases.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, StaticCache

from affine_attention import Mechanism
from affine_attention.hf import attach, detach
from affine_attention.nn import PRESETS

from .models import FAMILIES, make_model, make_tokens, oracle, plain_model
from .test_attach import EXACT, assert_equals_oracle
from .test_classes import assert_same
from .test_generation import batched, each, full_forward_tokens, prompts
from .test_masks import packed_positions, padded_rows, run_real
from .test_training import assert_same_state, train

PAGE = Path(__file__).parents[2] / "docs" / "hf-matrix.md"


class NotApplicable(Exception):
    """The combination does not exist; the message says why."""


def settings(mechanism: str) -> Mechanism:
    return Mechanism.named(mechanism, bias_length=6, running_alpha_start=0.4)


def double(family: str, mechanism: str):
    return make_model(family, settings(mechanism), torch.float64)


def gradients(family: str, mechanism: str) -> None:
    """logits and every gradient equal a dense formula in fp64"""
    assert_equals_oracle(double(family, mechanism), input_ids=make_tokens())


def padding(family: str, mechanism: str) -> None:
    """left and right padding, with gradients, equal the dense formula"""
    model = double(family, mechanism)
    for side in ("left", "right"):
        mine = run_real(model, *padded_rows(side))
        with oracle():
            truth = run_real(model, *padded_rows(side))
        torch.testing.assert_close(mine, truth, **EXACT)


def packing(family: str, mechanism: str) -> None:
    """documents packed by position_ids, with gradients, equal the dense formula"""
    assert_equals_oracle(double(family, mechanism), input_ids=make_tokens(), position_ids=packed_positions())


def caches(family: str, mechanism: str) -> None:
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
            torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)


def generation(family: str, mechanism: str) -> None:
    """greedy tokens with dynamic, static and no cache, for one prompt and padded batches, equal those of one forward"""
    model, rows = make_model(family, settings(mechanism)), prompts(2)
    told = each(model, rows, 8)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert full_forward_tokens(model, rows, told) == told
    assert each(model, rows, 8, **static) == told
    assert each(model, rows, 8, use_cache=False) == told
    assert batched(model, rows, 8) == told
    assert batched(model, rows, 8, **static) == told


def checkpointing(family: str, mechanism: str) -> None:
    """two steps with gradient checkpointing give bitwise equal weights and running averages"""
    plain = make_model(family, settings(mechanism)).train()
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable()
    batches = [padded_rows("left")]
    assert train(plain, batches) == train(checked, batches)
    assert_same_state(plain, checked)


def compilation(family: str, mechanism: str) -> None:
    """two steps of the whole model compiled with fullgraph=True equal the eager ones"""
    eager = make_model(family, settings(mechanism)).train()
    if "num_experts_per_tok" in FAMILIES[family]:
        eager.set_experts_implementation("batched_mm")  # the only one that compiles on a CPU, attached or not
    traced = copy.deepcopy(eager)
    torch._dynamo.reset()
    call = torch.compile(traced, fullgraph=True, backend="aot_eager")
    batches = [(make_tokens(), None)]
    mine, theirs = train(traced, batches, call), train(eager, batches)
    assert all(abs(a / b - 1) < 1e-5 for a, b in zip(mine, theirs, strict=True))
    assert_same_state(eager, traced, exact=False)


def saving(family: str, mechanism: str) -> None:
    """save_pretrained and from_pretrained give a bitwise equal model"""
    model = make_model(family, settings(mechanism))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert_same(AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager"), model)


def weights(family: str, mechanism: str) -> None:
    """output_attentions=True returns the weights of the dense formula"""
    model = double(family, mechanism)
    mine = model(make_tokens(), output_attentions=True, use_cache=False).attentions
    with oracle():
        truth = model(make_tokens(), output_attentions=True, use_cache=False).attentions
    assert len(mine) == 2
    torch.testing.assert_close(tuple(mine), tuple(truth), **EXACT)


def identity(family: str, mechanism: str) -> None:
    """start="identity" keeps the logits bitwise equal, and detach restores the plain model"""
    if PRESETS[mechanism].identity_scale is None:
        raise NotApplicable("a sink, or an alpha that does not start at a power of 2, has no identity start")
    plain = plain_model(family)
    model = attach(copy.deepcopy(plain), mechanism, start="identity")
    assert torch.equal(model(make_tokens()).logits, plain(make_tokens()).logits)
    assert_same(detach(model), plain)


FEATURES: tuple[Callable[[str, str], None], ...] = (
    gradients, padding, packing, caches, generation, checkpointing, compilation, saving, weights, identity
)  # fmt: skip


def run(families: list[str], mechanisms: list[str]) -> dict[tuple[str, str, str], str]:
    """Runs every cell and returns its result: "ok", "-" or the error."""
    cells = {}
    for family in families:
        begin = time.perf_counter()
        for mechanism in mechanisms:
            for feature in FEATURES:
                try:
                    feature(family, mechanism)
                    word = "ok"
                except NotApplicable:
                    word = "-"
                except Exception as error:
                    word = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
                cells[family, mechanism, feature.__name__] = word
        bad = sum(word not in ("ok", "-") for key, word in cells.items() if key[0] == family)
        print(f"{family:10s} {time.perf_counter() - begin:6.1f} s   {bad} failed cells", flush=True)
    return cells


def page(cells: dict[tuple[str, str, str], str], families: list[str], mechanisms: list[str]) -> str:
    """The matrix as markdown: a row per family, a column per feature, the number of working mechanisms in each cell."""
    names = [feature.__name__ for feature in FEATURES]
    lines = [
        "# Families, mechanisms, features",
        "",
        f"Written by `python -m tests.hf.matrix --write` with transformers {transformers.__version__} and torch "
        f"{torch.__version__.split('+')[0]}; every cell was run on a tiny model of that family. A cell counts the "
        f"mechanisms for which the feature works, of {len(mechanisms)}: {', '.join(mechanisms)}.",
        "",
        *(f"- **{feature.__name__}**: {feature.__doc__}" for feature in FEATURES),
        "",
        "| family | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for family in families:
        row = []
        for name in names:
            words = [cells[family, mechanism, name] for mechanism in mechanisms]
            possible = sum(word != "-" for word in words)
            row.append(f"{words.count('ok')}/{possible}")
        lines.append(f"| {family} | " + " | ".join(row) + " |")
    lines += ["", "`identity` does not exist for mechanisms with a sink (off_by_one, sink): see `hf.attach`."]
    wrong = [f"- {f}, {m}, {n}: {word}" for (f, m, n), word in cells.items() if word not in ("ok", "-")]
    if wrong:
        lines += ["", "## Failures", "", *wrong]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--mechanisms", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    text = page(run(given.families, given.mechanisms), given.families, given.mechanisms)
    if given.write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
