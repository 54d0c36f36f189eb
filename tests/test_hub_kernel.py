"""The folder for the package `kernels`: loaded by it, equal to the reference, used by transformers on gpt-oss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from affine_attention import attention
from affine_attention.hub_kernel import VARIANT, main, write_hub_kernel

NAME = "affine-attention/affine-attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hub_kernel(tmp_path_factory.mktemp("kernel"))


def test_equal_sources_give_equal_files(folder, tmp_path):
    again = write_hub_kernel(tmp_path / "again")
    (again / VARIANT / "ops" / "old.py").write_text("raise ImportError('a file of an older version')")
    assert write_hub_kernel(again) == again
    files = {path.relative_to(again): path.read_bytes() for path in again.rglob("*") if path.is_file()}
    assert files == {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    metadata = json.loads((folder / VARIANT / "metadata.json").read_text())
    assert metadata["name"] == "affine-attention"
    assert metadata["id"].isidentifier()


def test_a_folder_with_other_content_is_refused(tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("mine")
    assert main([str(tmp_path)]) == 1
    assert "folder must be new, empty or a kernel folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]
    assert main([]) == 2


def test_get_local_kernel_loads_it_beside_the_package(folder):
    """Its operators have names of their own: both libraries are registered in one process."""
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")
    kernel = kernels.get_local_kernel(folder)
    import affine_attention.ops.fused.decode.op
    import affine_attention.ops.fused.op  # noqa: F401

    __import__(f"{kernel.__name__}.ops.fused.decode.op")
    __import__(f"{kernel.__name__}.ops.fused.op")
    assert kernel.attention.__module__ != attention.__module__
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 9, heads, 16, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    sinks = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    out = kernel.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), s_aux=sinks)
    q1, k1, v1 = (x.transpose(1, 2) for x in (q, k, v))
    expected = attention(q1, k1, v1, sink=sinks, is_causal=True, window=4, impl="reference").transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    leaves = (q, k, v, sinks)
    for own, truth in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), leaves),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(own, truth, rtol=1e-11, atol=1e-11)


# An environment variable chooses the folder of the kernel, and transformers keeps the kernel it has loaded: this is a
# process of its own.
GPT_OSS = """
import sys
import torch
from transformers import AutoModelForCausalLM, GptOssConfig

shape = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
config = GptOssConfig(**shape, num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
                      sliding_window=8, layer_types=["sliding_attention", "full_attention"])
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
for layer in model.model.layers:
    torch.nn.init.normal_(layer.self_attn.sinks)
tokens = torch.randint(64, (2, 24))
padded = torch.ones_like(tokens)
padded[0, :5] = 0

def step():
    model.zero_grad()
    out = model(tokens, labels=tokens)
    out.loss.backward()
    with torch.no_grad():
        logits = model(tokens, attention_mask=padded).logits[padded.bool()]
    new = model.generate(tokens[:1], max_new_tokens=8, do_sample=False)
    return [out.logits, logits, *(p.grad for p in model.parameters() if p.grad is not None)], new

expected, tokens_expected = step()
model.set_attn_implementation(sys.argv[1], allow_all_kernels=True)
got, tokens_got = step()
assert len(got) == len(expected)
for a, b in zip(got, expected):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
assert torch.equal(tokens_got, tokens_expected)
print("equal", max(float((a - b).abs().max()) for a, b in zip(got, expected)))
"""


@pytest.mark.slow
def test_transformers_trains_and_generates_gpt_oss_with_it(folder):
    """transformers 5.17 accepts kernels 0.16 only, with which its models cannot be pickled: it is not our pin."""
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("needs a version of the package kernels that this transformers accepts")
    environment = {**os.environ, "LOCAL_KERNELS": f"{NAME}={folder}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", GPT_OSS, NAME], env=environment, capture_output=True, text=True,
                            timeout=240, check=False)  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith("equal")
