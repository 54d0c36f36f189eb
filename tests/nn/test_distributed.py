"""Training on several ranks equals training on one: DDP and FSDP2 on gloo, with accumulation and checkpointing."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from affine_attention import commit_running_alpha
from tests.training_loop import train_on_sums

from .models import TinyLM, make_tokens, running_alphas, summed_loss

STEPS = 3
BATCH = 8


def make_model() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM("affine_gated")


def train(model, batches, inner, ranks=1):
    """Trains on this rank's part of every batch; returns the losses of this rank and the running averages."""
    losses = train_on_sums(model, inner, batches, summed_loss, steps=STEPS, rate=0.01, ranks=ranks)
    return losses, running_alphas(inner)


def ragged_batch():
    """Rows of unequal length, so that ranks have different numbers of real tokens."""
    return make_tokens(BATCH), torch.arange(12)[None] >= torch.arange(BATCH)[:, None]


def worker(rank: int, world: int, port: int, kind: str, folder: str) -> None:
    in_group(rank, world, port, lambda: train_rank(rank, world, kind, folder))


def in_group(rank: int, world: int, port: int, work: Callable[[], None]) -> None:
    """Runs `work` in a process group; its objects must be freed before the group is destroyed, or that call hangs."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        work()
    finally:
        dist.destroy_process_group()


def train_rank(rank: int, world: int, kind: str, folder: str) -> None:
    inner = make_model()
    if "checkpoint" in kind:
        inner.reentrant = False
    tokens, mask = (x.chunk(world)[rank] for x in ragged_batch())
    parts = 2 if "accumulate" in kind else 1
    batches = list(zip(tokens.chunk(parts), mask.chunk(parts), strict=True))
    if kind.startswith("ddp"):
        model = torch.nn.parallel.DistributedDataParallel(inner, broadcast_buffers="buffers" in kind)
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in inner.layers:
            fully_shard(layer, mesh=mesh)
        model = fully_shard(inner, mesh=mesh)
    losses, averages = train(model, batches, inner, world)
    torch.save({"losses": losses, "averages": averages}, f"{folder}/{rank}.pt")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("ddp+buffers+accumulate", 2),
        pytest.param("ddp", 4, marks=pytest.mark.slow),
        ("fsdp+checkpoint+accumulate", 2),
        ("fsdp", 4),
    ],
)
def test_ranks_equal_one_rank(kind, world, tmp_path: Path):
    mp.spawn(worker, args=(world, free_port(), kind, str(tmp_path)), nprocs=world)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]

    single = make_model()
    losses, averages = train(single, [ragged_batch()], single)
    for result in results:
        assert torch.equal(result["averages"], results[0]["averages"]), "ranks have drifted apart"
    torch.testing.assert_close(results[0]["averages"], averages, rtol=1e-6, atol=1e-7)
    summed = [sum(parts) for parts in zip(*(result["losses"] for result in results), strict=True)]
    assert summed == pytest.approx(losses, rel=1e-5)


def test_a_rank_without_tokens_takes_part_in_the_commit(tmp_path: Path):
    """The commit is a collective: a rank without data must neither block the others nor change the mean."""
    mp.spawn(idle_worker, args=(2, free_port(), str(tmp_path)), nprocs=2)
    averages = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    single = make_model()
    summed_loss(single, *ragged_batch()).backward()
    commit_running_alpha(single)
    for average in averages:
        torch.testing.assert_close(average, running_alphas(single), rtol=1e-6, atol=1e-7)


def idle_worker(rank: int, world: int, port: int, folder: str) -> None:
    in_group(rank, world, port, lambda: commit_with_idle_rank(rank, folder))


def commit_with_idle_rank(rank: int, folder: str) -> None:
    model = make_model()
    if rank == 0:
        summed_loss(model, *ragged_batch()).backward()
    commit_running_alpha(model)
    torch.save(running_alphas(model), f"{folder}/{rank}.pt")
