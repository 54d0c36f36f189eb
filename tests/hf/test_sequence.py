"""An attached model on P ranks that hold parts of each sequence equals one rank: loss, gradients, running averages."""

from __future__ import annotations

import copy
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForSequenceClassification, DynamicCache

from affine_attention import Mechanism, commit_running_alpha, hf, sequence_parallel
from tests.nn.test_distributed import in_group
from tests.nn.test_ulysses import WORLD, assert_near, groups, message_of, start_ranks, state_of

from .models import make_model, make_tokens, plain_model

BATCH, LENGTH = 2, 16
STEPS = 2


class Case(NamedTuple):
    """One run; with 2 ranks to a sequence, the 4 ranks are a mesh of 2 x 2 and half of them hold the other rows."""

    ranks: int
    kind: str = "plain"
    family: str = "llama"
    mechanism: Mechanism | str = "affine"
    changes: dict[str, Any] = {}  # noqa: RUF012  a tuple's default, never changed
    reentrant: bool | None = None
    dtype: torch.dtype = torch.float32


VISIBLE = Mechanism.named("affine", bias_length="visible")
CASES = {
    "plain-2": Case(2),
    "plain-4": Case(4),
    "left-2": Case(2, "left", mechanism="affine_gated"),
    "right-4": Case(4, "right", mechanism=VISIBLE),
    "packed-2": Case(2, "packed", mechanism=VISIBLE),
    "packed-4": Case(4, "packed", "qwen3", "affine_gated", {"num_key_value_heads": 1}),
    "fp64-4": Case(4, "left", dtype=torch.float64),
    "window-4": Case(4, "plain", "mistral", VISIBLE, {"sliding_window": 5}),  # wider than a part
    "window-and-full-2": Case(
        2, "packed", "qwen2", VISIBLE, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "gpt2-4": Case(4, "left", "gpt2", "sink"),
    "mixtral-2": Case(2, "right", "mixtral", "affine"),
    "softmax-4": Case(4, "packed", "llama", "softmax"),
    "checkpointed-2": Case(2, "packed", reentrant=False),
    "reentrant-4": Case(4, "left", reentrant=True),
}


def make(case: Case) -> Any:
    model = make_model(case.family, case.mechanism, case.dtype, **case.changes).train()
    if case.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": case.reentrant})
    return model


def make_batch(kind: str) -> dict[str, Tensor]:
    tokens = make_tokens(BATCH, LENGTH)
    labels, place = tokens.clone(), torch.arange(LENGTH)[None]
    labels[0, 9] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if kind in ("left", "right"):
        keep = place >= torch.tensor([[6], [1]]) if kind == "left" else place < torch.tensor([[10], [15]])
        batch |= {"attention_mask": keep.long(), "labels": labels.masked_fill(~keep, -100)}
        if kind == "left":
            batch["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)
    if kind == "packed":  # a document that ends inside a part, one that starts with a part, one over several parts
        starts = (place == 0) | (place == torch.tensor([[3], [6]])) | (place == 8)
        begin = torch.where(starts, place, 0).cummax(-1).values
        batch |= {"position_ids": place - begin, "labels": labels.masked_fill(starts, -100)}
    return batch


def rows_of(batch: dict[str, Tensor], row: int, rows: int) -> dict[str, Tensor]:
    return {name: x.chunk(rows)[row] for name, x in batch.items()}


def run_case(case: Case, group: Any, row: int, rows: int) -> dict[str, Tensor]:
    model, batch = make(case), make_batch(case.kind)
    handle = hf.sequence_parallel(model, group)
    labels = (batch["labels"][:, 1:] != -100).sum()
    if case.ranks < WORLD:
        batch = rows_of(batch, row, rows)
    part = hf.shard_batch(batch, group)
    part["num_items_in_batch"] = labels / WORLD  # the mean over all ranks is that of all rows
    if "position_ids" in batch or case.kind == "right":
        out = model(**part)
    else:
        out = model(**{name: x for name, x in part.items() if name != "position_ids"})  # each rank knows its place
    out.loss.backward()
    commit_running_alpha(model)
    loss = out.loss.detach()
    for x in (loss, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(x)
        x /= WORLD
    found = state_of(model, loss) | {"logits": out.logits.detach()}
    assert "_affine_sequence_ranks" not in model.config.to_dict()
    handle.remove()
    assert not vars(model.config).keys() & {"_affine_sequence_ranks"}
    return found


def train(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for _ in range(STEPS):
        for batch in batches:
            loss = model(**batch).loss / len(batches)
            loss.backward()
        losses.append(loss.item() * len(batches))
        optimizer.step()
        optimizer.zero_grad()
        commit_running_alpha(model)
    return losses, {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in model.state_dict().items()}


def run_sharded() -> dict[str, Any]:
    """FSDP2 on a mesh of two dimensions: replicated over the rows, sharded over the ranks of a sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    model = make(Case(2, mechanism="affine_gated"))
    hf.sequence_parallel(model, mesh["sequence"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    batch = rows_of(make_batch("left"), mesh["data"].get_local_rank(), 2)
    labels = (make_batch("left")["labels"][:, 1:] != -100).sum()
    part = hf.shard_batch(batch, mesh["sequence"]) | {"num_items_in_batch": labels / WORLD}
    losses, state = train(model, [part])
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {"losses": mean / WORLD, "state": state}


def run_ddp() -> dict[str, Any]:
    model = make(Case(4))
    hf.sequence_parallel(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    losses, _ = train(wrapped, [hf.shard_batch(make_batch("packed"))])
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {"losses": mean / WORLD, "state": model.state_dict()}


def run_errors(rank: int) -> dict[str, str]:
    model, batch = make(Case(4)), make_batch("left")
    found = {
        "length": message_of(lambda: hf.shard_batch({"input_ids": make_tokens(2, 13)})),
        "keys": message_of(lambda: hf.shard_batch(batch | {"cu_seq_lens_q": torch.zeros(3)})),
        "no tokens": message_of(lambda: hf.shard_batch({"labels": batch["labels"]})),
        "mask of pairs": message_of(lambda: hf.shard_batch(batch | {"attention_mask": torch.ones(2, 1, 16, 16)})),
        "plain": message_of(lambda: hf.sequence_parallel(plain_model())),
        "heads": message_of(
            lambda: hf.sequence_parallel(make_model(num_attention_heads=6, num_key_value_heads=3, hidden_size=48))
        ),
        "classifier": message_of(lambda: hf.sequence_parallel(classifier())),
        "router": message_of(lambda: hf.sequence_parallel(make_model("mixtral", output_router_logits=True))),
        "rope": message_of(lambda: hf.sequence_parallel(make_model(rope_parameters=DYNAMIC))),
    }
    wrong = sequence_parallel(model)
    part = hf.shard_batch(batch)
    found["layers only"] = message_of(lambda: model(**part))
    wrong.remove()
    handle = hf.sequence_parallel(model)
    pairs = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    tokens = part["input_ids"]
    found |= {
        "labels": message_of(lambda: model(tokens, labels=tokens)),
        "cache": message_of(lambda: model(tokens, past_key_values=DynamicCache())),
        "weights": message_of(lambda: quietly(model, tokens)),
        "pairs": message_of(lambda: model(tokens, attention_mask=pairs)),
        "uneven": message_of(lambda: model(tokens[:, : 4 - (rank == 2)])),
        "detach": message_of(lambda: hf.detach(model)),
    }
    assert copy.deepcopy(model)(tokens).logits.shape == (2, 4, 64)
    handle.remove()
    whole, plain = model(batch["input_ids"]).logits, make(Case(4))(batch["input_ids"]).logits
    found["removed"] = str(torch.equal(whole, plain))
    return found


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def quietly(model: Any, tokens: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(tokens, output_attentions=True)


def classifier() -> Any:
    model = AutoModelForSequenceClassification.from_config(plain_model().config, attn_implementation="sdpa")
    return hf.attach(model, "affine")


def work(rank: int, folder: str) -> None:
    by_ranks, row, rows = groups()
    found: dict[str, Any] = {name: run_case(case, by_ranks[case.ranks], row, rows) for name, case in CASES.items()}
    found |= {"errors": run_errors(rank), "fsdp": run_sharded(), "ddp": run_ddp()}
    torch.save(found, f"{folder}/{rank}.pt")


def worker(rank: int, port: int, folder: str) -> None:
    in_group(rank, WORLD, port, lambda: work(rank, folder))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return start_ranks(worker, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_parts_equal_one_rank(name, results):
    case = CASES[name]
    model, batch = make(case), make_batch(case.kind)
    out = model(**batch, use_cache=False)
    out.loss.backward()
    commit_running_alpha(model)
    # Transformers computes the loss in fp32, whatever the dtype of a model.
    bound = 1e-6
    rows = BATCH * case.ranks // WORLD
    for rank, found in enumerate(results):
        for key, x in state_of(model, out.loss.detach()).items():
            assert_near(found[name][key], x, bound if key == "loss" else 4 * bound, key)
            if "running_alpha" in key:
                assert torch.equal(found[name][key], results[0][name][key]), "ranks have drifted apart"
        first, place = (rank // case.ranks) * rows, rank % case.ranks
        length = LENGTH // case.ranks
        part = out.logits[first : first + rows, place * length : (place + 1) * length]
        real = batch.get("attention_mask", torch.ones(BATCH, LENGTH)).bool()
        real = real[first : first + rows, place * length : (place + 1) * length]
        if real.any():
            assert_near(found[name]["logits"][real], part[real], 4 * bound, "logits")


@pytest.mark.parametrize(("name", "kind", "mechanism"), [("fsdp", "left", "affine_gated"), ("ddp", "packed", "affine")])
def test_training_with_sharded_and_replicated_weights(name, kind, mechanism, results):
    model = make(Case(4, mechanism=mechanism))
    losses, state = train(model, [make_batch(kind)])
    for found in results:
        torch.testing.assert_close(found[name]["losses"], torch.tensor(losses), rtol=1e-6, atol=1e-6)
        for key, x in state.items():
            assert_near(found[name]["state"][key], x, 1e-5, key)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("length", "input_ids must have a length that the 4 ranks of group divide, got 13; pad it to 16"),
        ("keys", "got 'cu_seq_lens_q', which sequence parallelism does not cut; take it out"),
        ("no tokens", "batch must hold input_ids [B, T] as a tensor, got ['labels']"),
        ("mask of pairs", "attention_mask must be a tensor of 2 dimensions [B, T], with T = 16"),
        ("plain", "TypeError: model must be an attached transformers model, got LlamaForCausalLM"),
        ("heads", "the query heads must be a multiple of the ranks of group, got 6 heads and 4 ranks"),
        ("classifier", "its head works on whole sequences; use a ...ForCausalLM model"),
        ("router", "output_router_logits=True"),
        ("rope", "rope_type='dynamic': frequencies depend on the length that a rank sees"),
        ("layers only", "call affine_attention.hf.sequence_parallel(model, group)"),
        ("labels", "labels need shift_labels and num_items_in_batch under sequence parallelism"),
        ("cache", "past_key_values cannot be used under sequence parallelism"),
        ("weights", "output_attentions=True is not served under sequence parallelism"),
        ("pairs", "attention_mask must have shape [B, T] = [2, 4] under sequence parallelism"),
        ("uneven", "length_of_the_part must be the same on all ranks of group, got [4, 4, 3, 4]"),
        ("detach", "model is sequence-parallel; call remove()"),
    ],
)
def test_errors_name_argument_rule_value_and_way_out(name, words, results):
    for found in results:
        assert words in found["errors"][name]


def test_a_compiled_model_is_refused():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = make(Case(4))
        hf.sequence_parallel(model)
        with pytest.raises(ValueError, match="uncompiled"):
            torch.compile(model, backend="eager")(make_tokens())
    finally:
        dist.destroy_process_group()


def test_remove_gives_whole_sequences_back(results):
    assert all(found["errors"]["removed"] == "True" for found in results)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sharding_by_accelerate_is_refused(name, monkeypatch):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState

    model, tokens = make_model(), make_tokens()
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(**{name: 2}))
    with pytest.raises(ValueError, match=f"{name} of accelerate's ParallelismConfig must be 1 .* got 2.*hf.sequence_p"):
        model(tokens)
    monkeypatch.undo()
    model(tokens)
