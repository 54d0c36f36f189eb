"""`sequence_parallel=P`: P ranks that share each sequence train as one rank does, with and without a teacher."""

from __future__ import annotations

import faulthandler
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.tensorfile import read_tensors
from affine_attention.lab.training.train import train
from tests.nn.test_distributed import free_port

from .runs import differences, log_without_timing, losses, tiny_recipe, write_text

# The ranks sum gradients and loss in another order than one rank. Adam divides by the root of the mean square, so a
# gradient near 0 with another rounding error moves its weight differently; a small rate keeps the losses together.
LOSS = 1e-6
RUNS = {
    "documents": {"mechanism": "affine", "device_batch": 2},
    "gated": {"mechanism": "affine_gated", "document_boundaries": False, "gradient_checkpointing": True},
    "teacher": {"mechanism": "affine", "kd_weight": 0.5, "ce_weight": 0.5},
    "cached": {"mechanism": "sink", "kd_weight": 1.0, "remember_teacher": True},
}


def recipe_of(folder: Path, name: str, ranks: int = 1) -> Recipe:
    changes = RUNS[name] | ({"teacher": str(folder / "its-teacher")} if "kd_weight" in RUNS[name] else {})
    return tiny_recipe(folder / "text.txt", **changes, learning_rate=1e-3, sequence_parallel=ranks)


def set_up(rank: int, port: int, world: int) -> None:
    faulthandler.dump_traceback_later(200, exit=True)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    torch.set_num_threads(1)


def work(rank: int, port: int, world: int, folder: str, size: int, names: tuple[str, ...]) -> None:
    set_up(rank, port, world)
    place, cache = Path(folder), Path(folder) / "cache"
    for name in names:
        train(recipe_of(place, name, size), place / f"{name}-{world}-{size}", device="cpu", cache=cache)
    # A run that is stopped after its checkpoint of step 4 and resumed equals the whole run.
    again = place / f"again-{world}-{size}"
    if rank == 0:
        _cut(place / f"documents-{world}-{size}", again)
    dist.barrier()
    train(recipe_of(place, "documents", size), again, device="cpu", cache=cache)
    odd = {"student_changes.num_attention_heads": 3, "student_changes.num_key_value_heads": 3}
    uneven = recipe_of(place, "documents", size).with_settings(odd)
    with pytest.raises(ValueError, match="the query heads must be a multiple of the ranks of group"):
        train(uneven, place / "odd", device="cpu", cache=cache)
    assert not (place / "odd" / "recipe.json").exists()
    dist.barrier()
    dist.destroy_process_group()


def _cut(run: Path, copy: Path) -> None:
    """A copy of a finished run as it was after step 4."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    shutil.rmtree(copy / "checkpoints" / "step-00000006")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Text and a teacher."""
    folder = tmp_path_factory.mktemp("sequence")
    write_text(folder / "text.txt")
    cache = folder / "cache"
    train(tiny_recipe(folder / "text.txt", "softmax", steps=2, decay_steps=0), folder / "its-teacher", device="cpu",
          cache=cache)  # fmt: skip
    return folder


def check(place: Path, world: int, size: int, *names: str) -> None:
    for name in names:
        train(recipe_of(place, name), place / name, device="cpu", cache=place / "cache")
    mp.spawn(work, args=(free_port(), world, str(place), size, names), nprocs=world)
    for name in names:
        one, several = place / name, place / f"{name}-{world}-{size}"
        for a, b in zip(log_without_timing(one), log_without_timing(several), strict=True):
            assert a.keys() == b.keys()
            for key in ("loss", "kd_loss", "ce_loss", "eval_loss", "eval_kd_loss", "eval_ce_loss"):
                if a.get(key) is not None:
                    assert b[key] == pytest.approx(a[key], rel=LOSS, abs=LOSS), (name, a["step"], key)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5), (name, a["step"])
            if "running_alpha" in a and RUNS[name]["mechanism"] != "sink":  # a sink has none
                torch.testing.assert_close(
                    torch.tensor(b["running_alpha"]), torch.tensor(a["running_alpha"]), rtol=1e-6, atol=1e-6
                )
        stored, others = (dict(read_tensors(run / "model" / "model.safetensors")) for run in (one, several))
        assert stored.keys() == others.keys()
        for key, x in stored.items():
            torch.testing.assert_close(others[key], x, rtol=0, atol=1e-4, msg=f"{name}: {key}")
    assert RunFolder(place / f"documents-{world}-{size}").manifest()["ranks"] == world
    again, whole = place / f"again-{world}-{size}", place / f"documents-{world}-{size}"
    if world == 2:
        assert not differences(again, whole)
    # DDP regroups its buckets after a first step, and with four ranks that changes the order of their sums.
    assert losses(again) == pytest.approx(losses(whole), rel=LOSS)


def test_two_ranks_that_share_each_sequence_equal_one(place):
    check(place, 2, 2, "documents", "teacher")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "size"), [(4, 4), (4, 2)])
def test_four_ranks_equal_one_in_one_group_or_two(place, world, size):
    check(place, world, size, *RUNS)


def refusal(**changes) -> str:
    with pytest.raises(ValueError) as error:
        tiny_recipe(Path("text.txt"), **changes)
    return str(error.value)


def test_what_cannot_be_split_is_refused_by_name(place):
    assert "sequence_length must be a multiple of sequence_parallel = 3, got 32; " in refusal(sequence_parallel=3)
    assert "set sequence_length=33" in refusal(sequence_parallel=3)
    assert "compile=True cannot be combined with sequence_parallel=2" in refusal(sequence_parallel=2, compile=True)
    assert "streaming=True cannot be combined" in refusal(sequence_parallel=2, streaming=True)
    assert "sink_pressure='first_key' cannot be combined" in refusal(sequence_parallel=2, sink_pressure="first_key")
    assert "sequence_parallel must be at least 1, got 0" in refusal(sequence_parallel=0)
    recipe = tiny_recipe(Path("text.txt"), sequence_parallel=2)
    assert recipe.micro_batches(4) == (4, 1)
    with pytest.raises(ValueError, match="needs a multiple of 2 ranks, got 1; start them with torchrun") as error:
        train(recipe, place / "alone", device="cpu", cache=place / "cache")
    assert "--nproc-per-node 2" in str(error.value)
    assert not (place / "alone").exists()
