"""Transformers' tensor parallelism and FSDP on two gloo ranks: all that a model computes equals that of one rank."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

from affine_attention import Mechanism, commit_running_alpha
from affine_attention.hf import data_parallel_group
from affine_attention.hf.parallel import head_plan
from affine_attention.nn.mechanism import as_mechanism
from tests.nn.test_distributed import free_port

from .models import make_model, make_tokens, running_alphas
from .test_training import summed_loss

WORLD = 2


def worker(rank: int, port: int, folder: str, kind: str) -> None:
    faulthandler.dump_traceback_later(60, exit=True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
                   "WORLD_SIZE": str(WORLD)}  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        run_rank(rank, folder, kind)
    finally:
        dist.destroy_process_group()


def run_rank(rank: int, folder: str, kind: str) -> None:
    from transformers.distributed import DistributedConfig

    split = {"tp_size": WORLD, "tp_plan": "auto"} if kind == "tp" else {"fsdp_size": WORLD}
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", distributed_config=DistributedConfig(**split))
    result = {"logits": model(make_tokens()).logits.detach()}
    model.train()
    loss = summed_loss(model, make_tokens())
    loss.backward()
    result["loss"] = loss.item()
    result["gradients"] = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad)
        for name, p in model.named_parameters()
    }
    if kind == "tp" and any(hasattr(m, "running_alpha") for m in model.modules()):
        with pytest.raises(ValueError, match="group is missing"):
            commit_running_alpha(model)
    commit_running_alpha(model, data_parallel_group(model))
    model.eval().save_pretrained(f"{folder}/again")
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.parametrize(
    ("kind", "mechanism"),
    [
        ("tp", "affine_gated"),
        pytest.param("tp", "sink", marks=pytest.mark.slow),
        ("tp", Mechanism("heads", activation="per_head", bias="centred", bias_length="visible")),
        pytest.param("tp", "affine_free", marks=pytest.mark.slow),
        pytest.param("tp", "constant_alpha", marks=pytest.mark.slow),
        pytest.param("tp", Mechanism("x", exclusion="learned", head_norm=True, gate=True), marks=pytest.mark.slow),
        pytest.param("tp", Mechanism("tokens", sink="token", differential=True), marks=pytest.mark.slow),
        pytest.param("fsdp", "affine_centred", marks=pytest.mark.slow),
        pytest.param("tp", "off_by_one", marks=pytest.mark.slow),
        ("fsdp", "affine_gated"),
        pytest.param("fsdp", "sink", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_equal_one(kind, mechanism, tmp_path: Path):
    mechanism = Mechanism.named(mechanism, bias_length=8) if isinstance(mechanism, str) else mechanism
    single = make_model("llama", mechanism)
    single.save_pretrained(tmp_path / "model")
    mp.spawn(worker, args=(free_port(), str(tmp_path), kind), nprocs=WORLD)
    logits = single(make_tokens()).logits
    single.train()
    loss = summed_loss(single, make_tokens())
    loss.backward()
    commit_running_alpha(single)
    for rank in range(WORLD):
        result = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(result["logits"], logits, rtol=1e-4, atol=1e-4)
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-5)
        for name, p in single.named_parameters():
            torch.testing.assert_close(result["gradients"][name], p.grad, rtol=1e-3, atol=1e-3, msg=name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.state_dict().keys() == single.state_dict().keys()
    if mechanism.has_running_alpha:
        torch.testing.assert_close(running_alphas(again), running_alphas(single), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again(make_tokens()).logits, single.eval()(make_tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mechanism", "parts"),
    [
        ("softmax", set()),
        ("constant_alpha", set()),
        ("affine", {"scale.proj"}),
        ("affine_free", {"scale.proj", "scale.beta_proj"}),
        ("sink", {"sink"}),
        ("off_by_one", set()),
        (Mechanism("heads", activation="per_head", gate=True), {"scale.head_alpha", "gate_proj"}),
        (Mechanism("x", exclusion="learned", head_norm=True), {"head_exclusion", "norm_weight"}),
        (Mechanism("tokens", sink="token", differential=True), {"sink_proj", "difference_proj"}),
    ],
)
def test_the_plan_gets_the_parameters_of_the_mechanism_alone(mechanism, parts):
    """Transformers warns about entries that no parameter has."""
    plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.up_proj": "colwise"}
    added = set(head_plan(plan, "affine", as_mechanism(mechanism))) - set(plan)
    assert added == {f"layers.*.self_attn.affine.{part}" for part in parts}


def test_plan_entries_are_added_only_where_heads_are_sharded():
    mechanism = Mechanism.named("affine")
    whole = {"layers.*.self_attn.qkv_proj": "colwise_gather_output"}
    assert head_plan(whole, "affine", mechanism) == whole
    assert head_plan(None, "affine", mechanism) is None
