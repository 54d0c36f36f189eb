"""P ranks that hold parts of each sequence equal one rank: loss, every gradient, running averages."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from affine_attention import (
    AttentionMechanism,
    KeyValueCache,
    Mechanism,
    SelfAttention,
    commit_running_alpha,
    sequence_parallel,
    shard_sequence,
)

from .test_distributed import free_port, in_group

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2}
WORLD, BATCH, LENGTH, WIDTH, HEADS = 4, 2, 16, 32, 4
# Imported once, by a process that then forks the ranks: less time than four imports.
PRELOADED = ["torch", "torch.distributed", "affine_attention", "affine_attention.hf", "transformers.models.llama"]


class Case(NamedTuple):
    """One run; with 2 ranks to a sequence, the 4 ranks are a mesh of 2 x 2 and half of them hold the other rows."""

    ranks: int
    mechanism: str = "affine"
    kv_heads: int = HEADS
    kind: str = "plain"
    settings: dict[str, Any] = {}  # noqa: RUF012  a tuple's default, never changed
    window: int | None = None
    dtype: torch.dtype = torch.float32
    reentrant: bool | None = None


CASES = {
    "plain-2": Case(2),
    "plain-4": Case(4),
    "fp64-4": Case(4, "affine_gated", 2, "segments", dtype=torch.float64),
    "bf16-4": Case(4, "affine_gated", 2, "segments", dtype=torch.bfloat16),  # alpha and beta are fp32
    "grouped-2": Case(2, kv_heads=2),
    "fewer-groups-than-ranks-4": Case(4, kv_heads=2, kind="padding"),
    "one-group-4": Case(4, "affine_gated", 1, "segments"),
    "visible-2": Case(2, "affine", 2, "padding", {"bias_length": "visible"}),
    "keys-4": Case(4, "affine", 2, "padding", {"bias_length": "keys"}),
    "length-below-the-sequence-4": Case(4, "affine", 2, "segments", {"bias_length": 3}),
    "window-4": Case(4, "affine", 2, "plain", {"bias_length": "visible"}, window=6),
    "sink-and-gate-2": Case(2, "affine_gated", 2, "padding", {"sink": "learned"}),
    "sink-4": Case(4, "sink", 1, "segments"),
    "off-by-one-4": Case(4, "off_by_one"),
    "token-sink-4": Case(4, "token_sink", 2, "segments"),
    "differential-2": Case(2, "differential", 2, "padding"),
    "centred-4": Case(4, "affine_centred", 2, "segments"),
    "softmax-2": Case(2, "softmax", 2, "padding"),
    "checkpointed-2": Case(2, "affine_gated", 2, "segments", reentrant=False),
    "reentrant-4": Case(4, "affine", 2, "padding", reentrant=True),
}


class Layers(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        mechanism = Mechanism.named(case.mechanism, **case.settings)
        self.layers = nn.ModuleList(
            SelfAttention(WIDTH, HEADS, case.kv_heads, mechanism, window=case.window) for _ in range(2)
        )
        self.reentrant = case.reentrant

    def forward(self, hidden: Tensor, **visible: Any) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                hidden = hidden + layer(hidden, **visible)
            else:
                call = lambda h, layer=layer: layer(h, **visible)  # noqa: E731
                hidden = hidden + checkpoint(call, hidden, use_reentrant=self.reentrant)
        return hidden


def make_layers(case: Case) -> Layers:
    torch.manual_seed(0)
    model = Layers(case).to(case.dtype)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "mechanism" in name else 0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("running_alpha"):
            buffer.uniform_(0.1, 0.9)
    return model


def make_batch(case: Case) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Hidden states, what is visible, and the weights of the loss [B, T, 1]."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=generator).to(case.dtype).requires_grad_()
    weights = torch.rand(BATCH, LENGTH, 1, generator=generator).to(case.dtype) / LENGTH
    place = torch.arange(LENGTH)[None]
    if case.kind == "padding":  # the first part of a row has no token at all
        mask = place >= torch.tensor([[5], [0]])
        return hidden, {"mask": mask}, weights * mask[..., None]
    if case.kind == "segments":  # a document that ends inside a part, and one that covers several
        return hidden, {"segment_ids": (place >= torch.tensor([[3], [7]])).long() + (place >= 10)}, weights
    return hidden, {}, weights


def run(model: Layers, hidden: Tensor, visible: dict[str, Tensor], weights: Tensor) -> Tensor:
    out = model(hidden, **visible)
    loss = (out.square() * weights).sum()
    loss.backward()
    return loss.detach()


def state_of(model: nn.Module, loss: Tensor, hidden: Tensor | None = None) -> dict[str, Tensor]:
    found = {f"grad {name}": parameter.grad for name, parameter in model.named_parameters()}
    found |= {name: x.clone() for name, x in model.named_buffers() if name.endswith("running_alpha")}
    return found | {"loss": loss} | ({} if hidden is None else {"grad hidden": hidden.grad})


def groups() -> tuple[dict[int, Any], int, int]:
    """The group of 4 ranks and the one of 2; this rank's place among the rows; the number of places."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    return {4: None, 2: mesh["sequence"]}, mesh["data"].get_local_rank(), 2


def run_case(case: Case, group: Any, row: int, rows: int) -> dict[str, Tensor]:
    model = make_layers(case)
    hidden, visible, weights = make_batch(case)
    if case.ranks < WORLD:
        hidden, weights = (x.detach().chunk(rows)[row].requires_grad_() for x in (hidden, weights))
        visible = {name: x.chunk(rows)[row] for name, x in visible.items()}
    part, weights = shard_sequence(hidden, group), shard_sequence(weights, group).detach()
    sequence_parallel(model, group)
    loss = run(model, part, {name: shard_sequence(x, group) for name, x in visible.items()}, weights)
    commit_running_alpha(model)
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return state_of(model, loss, hidden if case.ranks == WORLD else None)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def run_errors(rank: int, mesh_2: Any) -> dict[str, str]:
    case = Case(4)
    three = SelfAttention(48, 6, 2)
    model = make_layers(case)
    handle = sequence_parallel(model)
    hidden, _, _ = make_batch(case)
    layer = model.layers[0]
    uneven = hidden[:, : 4 + (rank == 1)]
    only_one = {"mask": torch.ones(BATCH, 4, dtype=torch.bool)} if rank == 0 else {}
    small = dist.new_group([0])
    found = {
        "length": message_of(lambda: shard_sequence(hidden[:, :14])),
        "heads": message_of(lambda: sequence_parallel(three)),
        "twice": message_of(lambda: sequence_parallel(model)),
        "no layers": message_of(lambda: sequence_parallel(nn.Linear(2, 2))),
        "group type": message_of(lambda: sequence_parallel(model, 4)),
        "mesh": message_of(lambda: sequence_parallel(model, mesh_2)),
        "uneven": message_of(lambda: model(uneven)),
        "one mask": message_of(lambda: model(hidden[:, :4], **only_one)),
        "cache": message_of(lambda: layer(hidden[:, :4], cache=KeyValueCache())),
        "dense mask": message_of(
            lambda: layer.mechanism(
                hidden[:, :4], *[hidden[:, :4].reshape(BATCH, HEADS, 4, 8)] * 3,
                mask=torch.ones(BATCH, 1, 4, 4, dtype=torch.bool),
            )
        ),
    }  # fmt: skip
    if rank == 0:
        found["commit"] = message_of(lambda: commit_running_alpha(model, small))
    handle.remove()
    whole = model(hidden)
    found["removed"] = str(torch.equal(whole, make_layers(case)(hidden)))
    return found


def run_context_parallel(mesh: Any) -> str:
    from torch.distributed.tensor.experimental import context_parallel

    layer, hidden = make_layers(Case(4)), torch.randn(BATCH, LENGTH, WIDTH)
    with context_parallel(mesh, buffers=[hidden], buffer_seq_dims=[1]):
        message = message_of(lambda: layer(hidden))
    layer(hidden)  # outside of the context it runs again
    return message


def work(rank: int, folder: str) -> None:
    by_ranks, row, rows = groups()
    found: dict[str, Any] = {name: run_case(case, by_ranks[case.ranks], row, rows) for name, case in CASES.items()}
    mesh = init_device_mesh("cpu", (2, 2))
    found["errors"] = run_errors(rank, mesh)
    found["context_parallel"] = run_context_parallel(init_device_mesh("cpu", (WORLD,)))
    torch.save(found, f"{folder}/{rank}.pt")


def worker(rank: int, port: int, folder: str) -> None:
    in_group(rank, WORLD, port, lambda: work(rank, folder))


def start_ranks(worker: Callable[..., None], folder: Path) -> list[dict[str, Any]]:
    """Runs `worker` on every rank and returns what each saved."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(worker, args=(free_port(), str(folder)), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_ranks(worker, tmp_path_factory.mktemp("ranks"))


def assert_near(found: Tensor, expected: Tensor, bound: float, name: str) -> None:
    """Within `bound` of the largest number of a tensor: sums of fp32 in another order."""
    error = (found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-30)
    assert error <= bound, f"{name}: {error:.1e} of the largest number"


@pytest.mark.parametrize("name", CASES)
def test_parts_equal_one_rank(name, results):
    case = CASES[name]
    model = make_layers(case)
    hidden, visible, weights = make_batch(case)
    loss = run(model, hidden, visible, weights)
    commit_running_alpha(model)
    expected = state_of(model, loss)
    bound = BOUNDS[case.dtype]
    for rank, found in enumerate(results):
        assert set(expected) <= set(found[name])
        for key, x in expected.items():
            if key != "loss":
                assert torch.equal(found[name][key], results[0][name][key]), f"{key} differs between ranks"
            # fp64 models keep running averages in fp32.
            assert_near(found[name][key], x, max(bound, 1e-6) if key.endswith("running_alpha") else bound, key)
        if case.ranks == WORLD:
            part = slice(rank * LENGTH // WORLD, (rank + 1) * LENGTH // WORLD)
            assert_near(found[name]["grad hidden"][:, part], hidden.grad[:, part], bound, "grad hidden")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("length", "ValueError: whole must have a length that the 4 ranks of group divide, got 14; pad it to 16"),
        ("heads", "the query heads must be a multiple of the ranks of group, got 6 heads and 4 ranks; pass a group of"),
        ("twice", "model is sequence-parallel already, over ranks [0, 1, 2, 3]; call remove()"),
        ("no layers", "model must have an AttentionMechanism or SelfAttention inside, got Linear"),
        ("group type", "TypeError: group must be a process group, a device mesh of 1 dimension, or None"),
        ("mesh", "group must be a process group or a device mesh of 1 dimension, got a mesh of 2 dimensions"),
        ("uneven", "length_of_the_part must be the same on all ranks of group, got [4, 5, 4, 4]; cut every tensor"),
        ("one mask", "has_mask must be the same on all ranks of group, got [1, 0, 0, 0]"),
        ("cache", "cache cannot be used under sequence parallelism"),
        ("dense mask", "mask must have shape [B, T] under sequence parallelism"),
    ],
)
def test_errors_name_argument_rule_value_and_way_out(name, words, results):
    for found in results:
        assert words in found["errors"][name]


def test_a_commit_over_some_parts_only_is_refused(results):
    assert (
        "group must contain all ranks that hold parts of a sequence, [0, 1, 2, 3], got ranks [0]"
        in (results[0]["errors"]["commit"])
    )


def test_remove_gives_whole_sequences_back(results):
    assert all(found["errors"]["removed"] == "True" for found in results)


def test_torchs_context_parallelism_is_refused(results):
    for found in results:
        assert "torch.distributed.tensor.experimental.context_parallel is active" in found["context_parallel"]
        assert "use affine_attention.sequence_parallel" in found["context_parallel"]


def test_without_torch_distributed():
    layer = AttentionMechanism("affine", WIDTH, HEADS, 8)
    with pytest.raises(ValueError, match=r"group needs torch\.distributed, which is not initialized; start the ranks"):
        sequence_parallel(layer)
