"""Tokens per second of transformers' continuous batching: attached models beside a plain one on `paged|sdpa`.

    python -m benchmarks.serving [--mechanisms affine sink] [--requests 128] [--rounds 5] [--quick] [--write]

Every variant has the same random weights (the shape of Llama-3.2-1B in bf16 on a GPU, a tiny one with --quick) and
serves the same prompts of many lengths. Variants take turns, each with a manager of continuous batching that runs from
the start, so that CUDA graphs are captured before the clock starts. Pages are not shared between rounds. Bar: an
attached model has 0.95 times the tokens per second of the plain one. On one H200 the default run takes a few minutes.
"""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from affine_attention import Mechanism
from affine_attention.hf import attach
from benchmarks.loop_timing import PLAIN, Function, build, per_second, take_turns, wall_seconds
from benchmarks.results_file import table, write

BAR = 0.95
SETTINGS = inspect.signature(ContinuousBatchingConfig).parameters  # they differ between versions of transformers
PAGE = "page_size" if "page_size" in SETTINGS else "block_size"
PLAIN_ATTENTION = "sdpa" if "auto_switch_to_flash" in SETTINGS else "paged|sdpa"


@dataclass(frozen=True)
class Sizes:
    """A model and the requests that it serves."""

    model: dict[str, int]
    requests: int
    shortest: int
    longest: int
    new_tokens: int
    page: int
    batch_tokens: int

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths, evenly spread from the shortest to the longest."""
        step = (self.longest - self.shortest) / max(self.requests - 1, 1)
        return [self.shortest + round(step * n) for n in range(self.requests)]

    @property
    def pages(self) -> int:
        """Pages for all requests at once, so that none waits for memory."""
        return sum((length + self.new_tokens) // self.page + 1 for length in self.lengths)


LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256}  # fmt: skip
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}  # fmt: skip
WHOLE = Sizes(LLAMA_1B, requests=128, shortest=32, longest=1024, new_tokens=128, page=256, batch_tokens=4096)
QUICK = Sizes(TINY, requests=6, shortest=1, longest=24, new_tokens=6, page=8, batch_tokens=48)


def build_model(sizes: Sizes, name: str, device: str) -> Any:
    torch.manual_seed(0)
    positions = sizes.longest + sizes.new_tokens
    config = LlamaConfig(**sizes.model, max_position_embeddings=positions, bos_token_id=None, eos_token_id=None)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    if name != PLAIN:
        return attach(model, Mechanism.named(name, running_alpha_start=0.5))
    model.set_attn_implementation(PLAIN_ATTENTION)
    return model


def start(sizes: Sizes, name: str, device: str) -> Any:
    """A running manager of continuous batching."""
    model = build_model(sizes, name, device)
    settings: dict[str, Any] = {
        PAGE: sizes.page, "num_blocks": sizes.pages, "max_batch_tokens": sizes.batch_tokens,
        "allow_block_sharing": False,
    }  # fmt: skip
    if "auto_switch_to_flash" in SETTINGS:
        settings["auto_switch_to_flash"] = False
    greedy = GenerationConfig(max_new_tokens=sizes.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = model.init_continuous_batching(
        generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**settings)
    )
    manager.warmup()
    manager.start()
    return manager


def serve(sizes: Sizes, manager: Any) -> Function:
    """A function that serves all requests once."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, sizes.model["vocab_size"], (length,), generator=generator).tolist() for length in sizes.lengths
    ]

    def run() -> None:
        missing = set(manager.add_requests(prompts, max_new_tokens=sizes.new_tokens))
        while missing:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"the manager stopped: {manager.background_thread_status.fatal_error}")
            if result is not None and result.is_finished():
                if result.error is not None or len(result.generated_tokens) != sizes.new_tokens:
                    raise RuntimeError(f"{len(result.generated_tokens)} tokens, {result.error}")
                missing.remove(result.request_id)

    return run


def measure(sizes: Sizes, mechanisms: list[str], rounds: int, device: str) -> dict[str, float | str]:
    """Generated tokens per second by variant, or the first line of the error of a variant that failed."""
    managers: list[Any] = []

    def builder(name: str) -> Function:
        managers.append(start(sizes, name, device))
        return serve(sizes, managers[-1])

    try:
        variants = build({name: partial(builder, name) for name in (PLAIN, *mechanisms)})
        seconds = take_turns(variants, rounds, wall_seconds(device, 1))
    finally:
        for manager in managers:
            manager.stop(block=True)
    return per_second(seconds, sizes.requests * sizes.new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanisms", nargs="+", default=["affine", "affine_gated", "sink", "softmax"])
    parser.add_argument("--requests", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/results")
    options = parser.parse_args()
    sizes = QUICK if options.quick else WHOLE
    if options.requests is not None:
        sizes = Sizes(**(vars(sizes) | {"requests": options.requests}))
    measured = measure(sizes, options.mechanisms, options.rounds, options.device)
    plain = measured[PLAIN]
    rows = []
    for name, speed in measured.items():
        label = "plain, on SDPA" if name == PLAIN else name
        if isinstance(speed, str) or isinstance(plain, str):
            rows.append([label, str(speed), ""])
        else:
            rows.append([label, f"{speed:,.0f}", f"{speed / plain:.3f}"])
    lines = [
        f"{sizes.requests} requests, prompts of {sizes.shortest} to {sizes.longest} tokens, {sizes.new_tokens} new "
        f"tokens each, hidden size {sizes.model['hidden_size']}, {sizes.model['num_hidden_layers']} layers, pages of "
        f"{sizes.page} tokens. Median of {options.rounds} rounds; variants take turns. The bar is {BAR} times the "
        "plain model.",
        "",
        *table(["variant", "generated tokens/s", "relative to plain"], rows),
    ]
    if options.write:
        write("serving", options.device, "Continuous batching", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
