"""A tiny model folder for tests of the documentation; and the end of a run, which says what was skipped and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that replaces the hub model of the documentation: a llama of two layers, with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hub") / "tiny"
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator([README.read_text()],
                                  trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))  # fmt: skip
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<unk>").save_pretrained(folder)
    config = LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


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
