"""The loss of a student and a teacher is that of their own logits, for every family, wrapped or not."""

from __future__ import annotations

import faulthandler
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from affine_attention.lab.distill.loss import DistillLoss, next_tokens
from tests.hf.models import VOCABULARY, make_model, make_tokens, plain_model
from tests.nn.test_distributed import free_port

ROW = 4 * VOCABULARY  # bytes of one token's logits
WORLD = 2


def batch(rows=4, length=9):
    tokens = make_tokens(rows, length)
    labels = tokens.clone()
    labels[0, 3:6] = labels[1, :7] = labels[2] = -100
    return {"input_ids": tokens, "labels": labels}


def plain_loss(student, teacher, inputs, kd_weight, ce_weight, temperature):
    """From the models' own logits."""
    labels = inputs["labels"][:, 1:]
    kept = labels != -100
    ours, theirs = (model(inputs["input_ids"]).logits[:, :-1][kept].float() for model in (student, teacher))
    log_q, log_p = (F.log_softmax(x / temperature, -1) for x in (ours, theirs.detach()))
    kd = temperature**2 * F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    ce = F.cross_entropy(ours, labels[kept], reduction="sum")
    return kd_weight * kd + ce_weight * ce, kd, ce, int(kept.sum())


def gradients(model):
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_same(student, teacher, weights, inputs, rtol=1e-4, atol=2e-5):
    student.zero_grad()
    parts = DistillLoss(*weights, chunk_bytes=5 * ROW)(student, teacher, inputs)
    parts.total_sum.backward()
    grads = gradients(student)
    student.zero_grad()
    total, kd, ce, tokens = plain_loss(student, teacher, inputs, *weights)
    total.backward()
    assert parts.tokens == tokens
    for found, expected in ((parts.total_sum, total), (parts.kd_sum, kd), (parts.ce_sum, ce)):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    expected_grads = gradients(student)
    assert grads.keys() == expected_grads.keys()
    for name, x in expected_grads.items():
        torch.testing.assert_close(grads[name], x, rtol=rtol, atol=atol, msg=name)
    assert all(x.grad is None for x in teacher.parameters())


def test_without_a_teacher_it_is_the_loss_of_transformers():
    student, inputs = make_model("llama"), batch()
    parts = DistillLoss(kd_weight=0.0, ce_weight=1.0)(student, None, inputs)
    parts.total_sum.backward()
    grads = gradients(student)
    student.zero_grad()
    mean = student(**inputs).loss
    mean.backward()
    assert parts.kd_sum is None
    torch.testing.assert_close(parts.total_sum / parts.tokens, mean)
    for name, x in gradients(student).items():
        torch.testing.assert_close(grads[name] / parts.tokens, x, rtol=1e-4, atol=1e-6, msg=name)


def test_micro_batches_add_up():
    student, teacher, inputs = make_model("llama"), plain_model("llama", seed=3), batch()
    loss = DistillLoss(0.5, 0.5)
    whole = loss(student, teacher, inputs)
    whole.total_sum.backward()
    grads = gradients(student)
    student.zero_grad()
    parts = [loss(student, teacher, {n: x[i : i + 1] for n, x in inputs.items()}) for i in range(4)]
    for part in parts:
        part.total_sum.backward()
    assert [p.tokens for p in parts] == [5, 2, 0, 8]
    assert parts[2].total_sum.item() == 0.0
    torch.testing.assert_close(sum(p.total_sum for p in parts), whole.total_sum)
    for name, x in gradients(student).items():
        torch.testing.assert_close(x, grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_position_t_predicts_the_next_token():
    labels = torch.tensor([[1, 2, 3], [4, -100, 6]])
    assert next_tokens(labels).tolist() == [2, 3, -100, -100, 6, -100]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_models_and_autocast(dtype):
    student, teacher = make_model("llama", dtype=dtype), plain_model("llama", seed=3, dtype=torch.bfloat16)
    inputs = batch()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        parts = DistillLoss(1.0, 1.0)(student, teacher, inputs)
    parts.total_sum.backward()
    grads = gradients(student)
    student.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        total, *_ = plain_loss(student, teacher, inputs, 1.0, 1.0, 1.0)
    total.backward()
    assert parts.total_sum.item() == pytest.approx(total.item(), rel=2e-3)
    for name, x in gradients(student).items():
        assert grads[name].dtype == dtype
        assert (grads[name].float() - x.float()).norm() < 0.1 * x.float().norm(), name


def test_another_vocabulary():
    student, teacher = make_model("llama"), plain_model("llama", seed=3, vocab_size=VOCABULARY + 16)
    with pytest.raises(ValueError) as error:
        DistillLoss()(student, teacher, batch())
    assert all(word in str(error.value) for word in ("64", "80", "truncate_vocabulary=True"))
    loss = DistillLoss(truncate_vocabulary=True)
    with pytest.warns(UserWarning, match="first 64 tokens"):
        parts = loss(student, teacher, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warned only once
        loss(student, teacher, batch())
    with torch.no_grad():
        teacher.lm_head.weight = torch.nn.Parameter(teacher.lm_head.weight[:VOCABULARY])
        _, kd, *_ = plain_loss(student, teacher, batch(), 1.0, 0.0, 1.0)
    torch.testing.assert_close(parts.kd_sum, kd)
    with pytest.warns(UserWarning, match="first 64 tokens"):
        DistillLoss(truncate_vocabulary=True)(plain_model("llama", vocab_size=80), student, batch())[0].backward()


@pytest.mark.parametrize(
    ("settings", "given", "words"),
    [
        ({}, {}, ("kd_weight=1.0 needs a teacher", "kd_weight=0")),
        ({"kd_weight": 0, "ce_weight": 1}, {"labels": None}, ('"labels"', "'input_ids'")),
        ({"kd_weight": 0, "ce_weight": 1}, {"labels": torch.tensor([1, 2])}, ("labels must be [B, T]", "[2]")),
    ],
)
def test_bad_calls(settings, given, words):
    with pytest.raises(ValueError) as error:
        DistillLoss(**settings)(plain_model("llama"), None, batch() | given)
    assert all(word in str(error.value) for word in words)


def test_a_bad_chunk():
    with pytest.raises(ValueError) as error:
        DistillLoss(chunk_bytes=0)
    assert "chunk_bytes must be at least 1" in str(error.value)


@pytest.mark.slow
def test_in_a_compiled_model():
    student, teacher = make_model("llama"), plain_model("llama", seed=3)
    compiled = torch.compile(student, backend="eager")
    expected = DistillLoss()(student, teacher, batch())
    parts = DistillLoss()(compiled, teacher, batch())
    torch.testing.assert_close(parts.total_sum, expected.total_sum)
    parts.total_sum.backward()
    assert student.lm_head.weight.grad.any()


def models():
    return make_model("llama", tie_word_embeddings=True), plain_model("llama", seed=3)


def train(model, teacher, inputs, ranks):
    """Two steps; the loss is divided by the tokens of all ranks, and multiplied by the ranks that are averaged over."""
    loss, optimizer = DistillLoss(0.6, 0.4), torch.optim.SGD(model.parameters(), 0.05)
    totals = []
    for _ in range(2):
        optimizer.zero_grad()
        parts = loss(model, teacher, inputs)
        tokens = torch.tensor(float(parts.tokens))
        if ranks > 1:
            dist.all_reduce(tokens)
        (parts.total_sum / tokens * ranks).backward()
        optimizer.step()
        totals.append(parts.total_sum.detach() / tokens)
    return torch.stack(totals)


def worker(rank: int, port: int, folder: str) -> None:
    faulthandler.dump_traceback_later(120, exit=True)  # prints a traceback if a rank hangs
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        results = {kind: run_rank(kind, rank) for kind in ("ddp", "fsdp", "fsdp+reshard", "fsdp+head")}
        torch.save(results, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def run_rank(kind: str, rank: int):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    inner, teacher = models()
    inputs = {name: x.chunk(WORLD)[rank] for name, x in batch().items()}
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(inner)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in inner.model.layers:
            fully_shard(layer, mesh=mesh)
        if kind == "fsdp+head":
            inner.lm_head.weight = torch.nn.Parameter(inner.lm_head.weight.detach().clone())
            fully_shard(inner.lm_head, mesh=mesh)
            fully_shard(teacher, mesh=mesh)
        model = fully_shard(inner, mesh=mesh, reshard_after_forward=kind == "fsdp+reshard" or None)
    totals = train(model, teacher, inputs, WORLD)
    state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in inner.state_dict().items()}
    return totals, state


def test_ranks_equal_one_rank(tmp_path: Path):
    mp.spawn(worker, args=(free_port(), str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    for kind in ranks[0]:
        student, teacher = models()
        if kind == "fsdp+head":
            student.lm_head.weight = torch.nn.Parameter(student.lm_head.weight.detach().clone())
        totals = train(student, teacher, batch(), 1)
        torch.testing.assert_close(sum(r[kind][0] for r in ranks), totals, rtol=1e-5, atol=1e-6, msg=kind)
        state = student.state_dict()
        for rank in ranks:
            for name, x in rank[kind][1].items():
                if not name.endswith("running_alpha"):
                    torch.testing.assert_close(x, state[name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
