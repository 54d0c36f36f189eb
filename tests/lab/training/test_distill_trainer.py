"""DistillTrainer: weight decay, learning rates, the loss, and steps that are not finite."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from affine_attention.lab.recipe import Recipe
from affine_attention.lab.run import RunFolder
from affine_attention.lab.training.checkpoints import Checkpoints
from affine_attention.lab.training.distill_trainer import DistillTrainer
from affine_attention.lab.training.nonfinite import NotFiniteError
from affine_attention.lab.training.student import build_student
from affine_attention.lab.training.trainer_arguments import training_arguments

from .runs import STUDENT

CPU = torch.device("cpu")


def make_rows(count=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 320, (count, 16), generator=generator)
    ragged = torch.rand(count, 16, generator=generator) < 0.4
    return [{"input_ids": row, "labels": row.masked_fill(hole, -100)} for row, hole in zip(rows, ragged, strict=True)]


def make_trainer(folder, mechanism="affine", rows=None, student=None, **changes):
    settings = {
        "mechanism": mechanism, "student_changes": STUDENT, "sequence_length": 16, "steps": 4, "global_batch": 4,
        "device_batch": 2, "warmup_steps": 0, "learning_rate": 1e-2, "probe_every": 0, "save_every": 0,
    }  # fmt: skip
    recipe = Recipe(**(settings | changes))
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    return DistillTrainer(
        recipe, run, student if student is not None else build_student(recipe),
        training_arguments(recipe, run, 1, device=CPU), rows or make_rows(),
        checkpoints=Checkpoints(run.checkpoints, 2, {}), heldout=make_rows(3, seed=1),
    )  # fmt: skip


@pytest.mark.parametrize("mechanism", ["affine_gated", "sink"])
def test_matrices_decay_and_vectors_do_not(tmp_path, mechanism):
    trainer = make_trainer(tmp_path, mechanism)
    trainer.create_optimizer()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    decayed, rest = ([names[id(p)] for p in group["params"]] for group in trainer.optimizer.param_groups)
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    assert all("norm" in name or name.endswith((".sink", ".bias")) for name in rest)
    assert any(name.endswith(".sink") for name in rest) == (mechanism == "sink")
    assert any("scale.proj.weight" in name for name in decayed) == (mechanism == "affine_gated")
    assert any("affine.gate_proj.weight" in name for name in decayed) == (mechanism == "affine_gated")
    assert "model.embed_tokens.weight" in decayed
    assert not any("norm" in name for name in decayed)
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert trainer.optimizer.defaults["betas"] == (0.9, 0.95)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"warmup_steps": 2, "decay_steps": 2}, [0, 0.5, 1, 1, 1, 0.5]),
        ({"warmup_steps": 2, "decay_steps": 0}, [0, 0.5, 1, 1, 1, 1]),
        ({"warmup_steps": 0, "decay_steps": 4, "min_lr_ratio": 0.5}, [1, 1, 1, 0.875, 0.75, 0.625]),
    ],
)
def test_rates_warm_up_stay_and_decay(tmp_path, settings, expected):
    trainer = make_trainer(tmp_path, steps=6, **settings)
    trainer.train()
    assert [line["learning_rate"] for line in trainer.run.log()] == pytest.approx([0.01 * x for x in expected])


def test_the_loss_is_a_mean_over_the_tokens_of_all_micro_batches(tmp_path):
    """With ragged masks a mean of means would differ. Computed by hand from the logits."""
    rows = make_rows()
    trainer = make_trainer(tmp_path, rows=rows, max_grad_norm=0.0, steps=1)
    model = build_student(trainer.recipe)
    batch = {key: torch.stack([row[key] for row in rows[:4]]) for key in rows[0]}
    logits = model(batch["input_ids"]).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    trainer.train()
    (line,) = trainer.run.log()
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_the_norm_is_kept_before_clipping(tmp_path):
    free = make_trainer(tmp_path, max_grad_norm=0.0, steps=1)
    free.train()
    (tmp_path / "run" / "log.jsonl").unlink()
    clipped = make_trainer(tmp_path, max_grad_norm=1e-3, steps=1)
    clipped.train()
    (line,) = clipped.run.log()
    assert line["grad_norm"] > 0.1
    assert clipped.watch.seconds > 0


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_never_reaches_the_optimizer(tmp_path, max_grad_norm):
    trainer = make_trainer(tmp_path, max_grad_norm=max_grad_norm)
    target = trainer.model.model.layers[1].self_attn.affine.scale.proj.weight
    seen = []

    def spoil(gradient):
        seen.append(1)
        # Of the third step: two micro-batches each.
        return gradient.index_fill(0, torch.tensor([1]), torch.nan) if len(seen) == 6 else gradient

    target.register_hook(spoil)
    before = []
    trainer.add_callback(Keep(before))
    with pytest.raises(NotFiniteError) as error:
        trainer.train()
    assert "step 3: the gradient of model.layers.1.self_attn.affine.scale.proj.weight is not finite" in str(error.value)
    assert len(trainer.run.log()) == 2
    for (name, tensor), kept in zip(trainer.model.state_dict().items(), before[-1], strict=True):
        assert torch.equal(tensor, kept), name
    scales = [m for m in trainer.model.modules() if hasattr(m, "collected")]
    assert len(scales) == 2
    assert all(scale.collected.grad is None for scale in scales), "the alphas of the failed step are discarded"


class Keep(TrainerCallback):
    """Copies the state dict after every step."""

    def __init__(self, kept):
        self.kept = kept

    def on_step_end(self, args, state, control, model=None, **_):
        self.kept.append([tensor.clone() for tensor in model.state_dict().values()])


def test_an_evaluation_counts_tokens_not_batches(tmp_path):
    trainer = make_trainer(tmp_path, device_batch=1)
    found = trainer.evaluate()
    rows = trainer.heldout
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(batch["input_ids"]).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert found["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["eval_loss"] == found["eval_ce_loss"]
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    generator = torch.get_rng_state()
    trainer.probe()
    trainer.evaluate()
    assert all(torch.equal(tensor, state[name]) for name, tensor in trainer.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
