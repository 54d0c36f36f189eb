"""Training on several ranks equals training on one rank: DDP and FSDP2 on gloo."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.nn.test_distributed import free_port
from tests.training_loop import train_on_sums

from .models import running_alphas
from .test_training import make_student, padded_rows, summed_loss

WORLD = 2
STEPS = 2


def ragged():
    tokens, mask = padded_rows("left")
    return torch.cat([tokens, tokens[:1]]), torch.cat([mask, mask[:1]])


def train(model, inner, batches, ranks=1):
    return train_on_sums(model, inner, batches, summed_loss, steps=STEPS, rate=1e-3, ranks=ranks)


def worker(rank: int, port: int, kind: str, folder: str) -> None:
    faulthandler.dump_traceback_later(30, exit=True)  # print the stack of a rank that hangs
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        # A separate function, so that DDP is freed before its process group; otherwise ranks may hang.
        run_rank(rank, kind, folder)
    finally:
        dist.destroy_process_group()


def run_rank(rank: int, kind: str, folder: str) -> None:
    inner = make_student()
    if "checkpoint" in kind:
        inner.gradient_checkpointing_enable()
    tokens, mask = (x.chunk(WORLD)[rank] for x in ragged())
    batches = [(tokens, mask)]
    if "accumulate" in kind:
        batches = list(zip(tokens.chunk(2), mask.chunk(2), strict=True))
    if kind.startswith("ddp"):
        model = torch.nn.parallel.DistributedDataParallel(inner)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in inner.model.layers:
            fully_shard(layer.self_attn if "attention" in kind else layer, mesh=mesh)
        model = fully_shard(inner, mesh=mesh)
    losses = train(model, inner, batches, WORLD)
    result = {"losses": losses, "averages": running_alphas(inner)}
    if kind.startswith("fsdp"):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        result["state"] = get_model_state_dict(inner, options=options)
        inner.save_pretrained(f"{folder}/saved", state_dict=dict(result["state"]), is_main_process=rank == 0)
    else:
        result["state"] = inner.state_dict()
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.mark.parametrize("kind", ["ddp+accumulate", "fsdp+checkpoint+accumulate", "fsdp+attention"])
def test_ranks_equal_one_rank(kind, tmp_path: Path):
    mp.spawn(worker, args=(free_port(), kind, str(tmp_path)), nprocs=WORLD)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    single = make_student()
    losses = train(single, single, [ragged()])
    for result in results:
        assert torch.equal(result["averages"], results[0]["averages"]), "ranks have drifted apart"
    torch.testing.assert_close(results[0]["averages"], running_alphas(single), rtol=1e-6, atol=1e-7)
    summed = [sum(parts) for parts in zip(*(result["losses"] for result in results), strict=True)]
    assert summed == pytest.approx(losses, rel=1e-5)
    for name, x in single.state_dict().items():
        torch.testing.assert_close(results[0]["state"][name], x, rtol=1e-4, atol=1e-6, msg=name)
    if kind.startswith("fsdp"):
        from transformers import AutoModelForCausalLM

        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(saved[name], x) for name, x in results[0]["state"].items())
