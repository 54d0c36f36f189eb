"""Tiny models for tests of the documentation; and the end of a run, which says what was skipped and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="session")
def without_hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Replaces the hub models of the documentation by folders with tiny models of the same family and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([README.read_text()],
                                  trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))  # fmt: skip
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    configs = {
        "HuggingFaceTB/SmolLM2-135M": LlamaConfig(**shape),
        "openai/gpt-oss-20b": GptOssConfig(**shape, num_local_experts=2, num_experts_per_tok=1, sliding_window=16),
    }
    hub = tmp_path_factory.mktemp("hub")

    def localised(code: str) -> str:
        if (name := "HuggingFaceTB/SmolVLM-256M-Instruct") in code:
            from .hf.multimodal import plain_multimodal

            plain_multimodal("smolvlm").save_pretrained(hub / name)
            code = code.replace(f'"{name}"', f'"{hub / name}"')
        for name, config in configs.items():
            folder = hub / name
            if name in code and not folder.exists():
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
                fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>")
                fast.save_pretrained(folder)
            code = code.replace(f'"{name}"', f'"{folder}"')
        return code

    return localised


def skip_reasons(reports: list[Any]) -> Counter[str]:
    """The reasons of skipped tests and how many tests have each; files that were skipped whole count once."""
    return Counter(str(report.longrepr[-1]).removeprefix("Skipped: ") for report in reports)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = skip_reasons(terminalreporter.stats.get("skipped", []))
    if not reasons:
        return
    terminalreporter.write_sep("=", f"skipped: {sum(reasons.values())}")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count:5d}  {reason}")
