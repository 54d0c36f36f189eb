"""Two ranks equal one: DDP through `train`, FSDP2 through the trainer's loss, commit and checkpoint."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from affine_attention import commit_running_alpha
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.signals import Stopped
from affine_attention.lab.training.state import (
    Gathering,
    load_optimizer_state,
    load_weights,
    optimizer_state,
    weights,
    whole_on_cpu,
)
from affine_attention.lab.training.student import build_student
from affine_attention.lab.training.tensorfile import read_tensors, write_tensors
from affine_attention.lab.training.train import train
from affine_attention.lab.training.trainer_arguments import make_loss
from tests.nn.test_distributed import free_port

from .runs import differences, tiny_recipe, write_text
from .test_train_splits import SPLITS

WORLD = 2


def set_up_rank(rank: int, port: int) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # prints a traceback if a rank hangs
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD),
    }  # fmt: skip
    torch.set_num_threads(1)


def work(rank: int, port: int, folder: str, recipe: dict) -> None:
    set_up_rank(rank, port)
    run_ddp(rank, folder, recipe)
    run_fsdp(rank, folder, recipe)
    dist.barrier()
    dist.destroy_process_group()


def run_ddp(rank: int, folder: str, recipe: dict) -> None:
    """Trains one run from end to end, and another that rank 1 is asked to stop."""
    settings, cache = Recipe.from_dict(recipe), Path(folder) / "cache"
    train(settings, f"{folder}/whole", device="cpu", cache=cache)
    stopped = Path(folder) / "stopped"
    if rank == 1:
        # Between two steps of its own, which need not be those of rank 0.
        torch.utils.data.SequentialSampler.__iter__ = _stopping_iterator
    with pytest.raises(Stopped) as stop:
        train(settings, stopped, device="cpu", cache=cache)
    assert stop.value.code == 143
    dist.barrier()
    train(settings, stopped, device="cpu", cache=cache)


def _stopping_iterator(sampler):
    """Sends this process SIGTERM while the batch of step 3 is read; once."""
    for item in range(len(sampler.data_source)):
        if item == 2 * 8 and not os.environ.get("STOPPED"):
            os.environ["STOPPED"] = "1"
            os.kill(os.getpid(), signal.SIGTERM)
        yield item


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder in which two ranks, started once for all tests here, have done their work, and its recipe."""
    folder = tmp_path_factory.mktemp("ranks")
    recipe = tiny_recipe(write_text(folder / "text.txt"), device_batch=4)
    mp.spawn(work, args=(free_port(), str(folder), recipe.to_dict()), nprocs=WORLD)
    return folder, recipe


def test_two_ranks_equal_one_and_stop_together(made, tmp_path):
    folder, recipe = made
    train(recipe, tmp_path / "single", device="cpu", cache=folder / "cache")
    ours, single = RunFolder(folder / "whole"), RunFolder(tmp_path / "single")
    assert ours.manifest()["ranks"] == 2
    for line, other in zip(ours.log(), single.log(), strict=True):
        assert line["tokens"] == other["tokens"]
        for key in ("loss", "ce_loss", "grad_norm", "learning_rate"):
            assert line[key] == pytest.approx(other[key], rel=SPLITS), (line["step"], key)
        if line.get("eval_loss"):
            assert line["eval_loss"] == pytest.approx(other["eval_loss"], rel=SPLITS)
        if line.get("running_alpha"):
            averages = torch.tensor(line["running_alpha"])
            torch.testing.assert_close(averages, torch.tensor(other["running_alpha"]), rtol=SPLITS, atol=1e-7)
    stopped = RunFolder(folder / "stopped")
    assert [e["event"] for e in stopped.events() if e["event"] != "save"] == ["start", "stop", "resume", "finish"]
    assert differences(stopped.path, ours.path) == []


def test_one_rank_resumes_where_two_were_stopped(made, tmp_path):
    folder, recipe = made
    run = RunFolder(shutil.copytree(folder / "whole", tmp_path / "run"))
    shutil.rmtree(run.model)
    shutil.rmtree(run.checkpoints / "step-00000006")
    before = [line["loss"] for line in run.log()]
    train(recipe, run.path, device="cpu", cache=folder / "cache")
    assert [line["loss"] for line in run.log()] == pytest.approx(before, rel=SPLITS)
    last = run.events()[-3]
    assert (last["event"], last["step"], last["ranks"]) == ("resume", 4, 1)


def sharded_steps(student, batches, ranks, recipe, steps, optimizer):
    """What DistillTrainer does between two steps, without Trainer: accelerate shards on GPUs only."""
    loss, found = make_loss(recipe), []
    for _ in range(steps):
        optimizer.zero_grad()
        count = torch.tensor(0)
        for batch in batches:
            count += (batch["labels"][:, 1:] != -100).sum()
        if ranks > 1:
            dist.all_reduce(count)
        total = torch.zeros(())
        for batch in batches:
            parts = loss(student, None, batch)
            (parts.total_sum * (ranks / count)).backward()
            total += parts.total_sum.detach()
        if ranks > 1:
            dist.all_reduce(total)
        optimizer.step()
        commit_running_alpha(student)
        found.append((total / count).item())
    return found


def make_batches():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 320, (8, 32), generator=generator)
    labels = ids.masked_fill(torch.rand(8, 32, generator=generator) < 0.3, -100)
    return ids, labels


def run_fsdp(rank: int, folder: str, recipe: dict) -> None:
    """Two steps, a checkpoint, two more; then the last two again from the checkpoint."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    settings = Recipe.from_dict(recipe)
    mesh = init_device_mesh("cpu", (WORLD,))

    def make():
        student = build_student(settings)
        for layer in student.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(student, mesh=mesh)
        return student, torch.optim.AdamW(student.parameters(), lr=1e-2)

    ids, labels = (x.chunk(WORLD)[rank] for x in make_batches())
    batches = [{"input_ids": i, "labels": n} for i, n in zip(ids.chunk(2), labels.chunk(2), strict=True)]
    student, optimizer = make()
    losses = sharded_steps(student, batches, WORLD, settings, 2, optimizer)
    with torch.no_grad():
        student(ids)  # an evaluation leaves the root's parameters unsharded
    tensors, groups = optimizer_state(student, optimizer)
    files = {"model": weights(student), "optimizer": tensors}
    for name, content in files.items():
        gathering = Gathering(content.values())
        if rank == 0:
            write_tensors(Path(folder) / f"{name}.safetensors", content.items(), gathering.fetch)
        gathering.finish()
    dist.barrier()
    losses += sharded_steps(student, batches, WORLD, settings, 2, optimizer)

    other, other_optimizer = make()
    load_weights(other, read_tensors(Path(folder) / "model.safetensors"))
    stored = read_tensors(Path(folder) / "optimizer.safetensors")
    load_optimizer_state(other, other_optimizer, stored, json.loads(json.dumps(groups)))
    again = sharded_steps(other, batches, WORLD, settings, 2, other_optimizer)
    assert again == losses[2:]
    for (name, a), b in zip(weights(student).items(), weights(other).values(), strict=True):
        assert torch.equal(whole_on_cpu(a), whole_on_cpu(b)), name
    if rank == 0:
        Path(folder, "losses.json").write_text(json.dumps(losses))


def test_a_sharded_student_is_trained_and_stored_like_an_unsharded_one(made):
    folder, recipe = made
    student = build_student(recipe)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    ids, labels = make_batches()
    losses = sharded_steps(student, [{"input_ids": ids, "labels": labels}], 1, recipe, 2, optimizer)
    stored = dict(read_tensors(folder / "model.safetensors"))
    assert set(stored) == set(weights(student)), "a sharded checkpoint has the names of an unsharded one"
    for name, tensor in weights(student).items():
        torch.testing.assert_close(stored[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    losses += sharded_steps(student, [{"input_ids": ids, "labels": labels}], 1, recipe, 2, optimizer)
    assert json.loads((folder / "losses.json").read_text()) == pytest.approx(losses, rel=SPLITS)
