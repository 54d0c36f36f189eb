"""Turns a student, a teacher and packed sequences into training steps: Hugging Face's Trainer with our loss and log.

What is Trainer's: the loop, accumulation, mixed precision, checkpointed activations, DDP and FSDP2. What is ours: the
loss (sums over tokens, so that micro-batches and ranks add up), one line of log for every step, a look at every number
before the optimizer may use it, and checkpoints that are whole or not there.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from ...files import read_json
from ...hf import RunningAlphaCallback
from ...nn import discard_running_alpha
from ..data import collate
from ..inspection.capture import Probe
from ..recipe import Recipe
from ..run import RunFolder, plain_numbers
from .checkpoints import CheckpointError, Checkpoints
from .contents import check_schedule
from .nonfinite import NotFiniteError, find_not_finite
from .progress import Progress
from .signals import StopSignals
from .state import (
    Gathering,
    load_optimizer_state,
    load_weights,
    of_all_ranks,
    optimizer_state,
    random_state,
    set_random_state,
    weights,
)
from .steplog import StepLog
from .stream_position import ResumableStream
from .tensorfile import read_tensors
from .timing import Stopwatch
from .trainer_arguments import make_loss

PROBED = 2  # held-out sequences that are looked at
EVALUATED = 256  # held-out sequences of an evaluation, at most


class StepNumbers(NamedTuple):
    """What a step brings to the host, in one transfer, before the optimizer is called."""

    loss: float
    kd_loss: float | None
    ce_loss: float
    grad_norm: float  # before clipping
    stop: int  # the signal that a rank has received, or 0
    seconds: float


class DistillTrainer(Trainer):
    """Trains a student by a recipe, in a run folder.

    Args:
        recipe: the settings of the run.
        run: where its log and checkpoints go.
        student: the model to train.
        arguments: made by `trainer_arguments.training_arguments`.
        train_dataset: sequences in their final order.
        heldout: sequences that are never trained on, or None.
        teacher: on the student's device, in evaluation mode; None for plain cross-entropy.
        tokenizer: its special tokens become the model's.
        checkpoints: where and whose they are.
        signals: noted stops; the run ends after the step in which one came.
        progress: what a terminal shows.
        utilisation: tokens a second -> the share of the devices' peak, or None where that is unknown.
        on_step: called on rank 0 with each line of the log.
        on_ready: called on rank 0 before the first step, when a checkpoint that is resumed from has been loaded.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        student: nn.Module,
        arguments: TrainingArguments,
        train_dataset: Any,
        *,
        checkpoints: Checkpoints,
        heldout: Any = None,
        teacher: nn.Module | None = None,
        tokenizer: Any = None,
        signals: StopSignals | None = None,
        progress: Progress | None = None,
        utilisation: Callable[[float], float | None] = lambda speed: None,
        on_step: Callable[[dict[str, Any]], None] | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            student,
            arguments,
            data_collator=collate,
            train_dataset=train_dataset,
            processing_class=tokenizer,
            callbacks=[RunningAlphaCallback()],
        )
        self.remove_callback(PrinterCallback)
        # The loss is a sum over labels[:, 1:] that we divide by Trainer's count of just these, over all micro-batches
        # and ranks. Without these two Trainer would divide once more by the number of micro-batches.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        self.recipe, self.run, self.teacher, self.heldout = recipe, run, teacher, heldout
        self.loss = make_loss(recipe)
        self.checkpoints, self.signals, self.progress = checkpoints, signals or StopSignals(), progress
        self.step_log, self.watch, self.utilisation = StepLog(run.log_file), Stopwatch(), utilisation
        self.on_step, self.on_ready = on_step, on_ready
        self.stopped_by = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)  # total, kd, ce of one step
        self._items: Tensor | int = 0
        self._numbers: StepNumbers | None = None
        self._random_of: str | None = None  # a checkpoint whose random state is still to be set

    # The loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        parts = self.loss(model, self.teacher, inputs)
        assert num_items_in_batch is not None, "every batch has labels"
        kd_sum = torch.zeros_like(parts.ce_sum) if parts.kd_sum is None else parts.kd_sum
        self._sums += torch.stack([parts.total_sum.detach(), kd_sum, parts.ce_sum])
        self._items = num_items_in_batch
        # DDP and FSDP2 average gradients over ranks, but this is a sum over all of them.
        return parts.total_sum * (self.accelerator.num_processes / num_items_in_batch)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Matrices decay: embeddings, every Linear, W_a and W_g among them. Vectors do not: norms, biases, sinks."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted here: Trainer would walk through all modules for every micro-batch."""
        return 0

    def store_flos(self) -> None:
        """Nothing, see `floating_point_ops`."""

    # A step: numbers first, then the optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = self._finish_backward(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._finish_backward(model) if grad_norm is None else grad_norm

    def _finish_backward(self, model: nn.Module) -> Tensor:
        """Reads the step's numbers, and raises before the optimizer is called if one of them is not finite."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        stop = torch.full((1,), self.signals.number, dtype=torch.float64, device=self._sums.device)
        sums = torch.cat([self._sums, stop])
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        items = torch.as_tensor(self._items, dtype=torch.float64, device=self._sums.device)
        # One transfer: each of them makes the host wait for the device.
        total, kd, ce, stop_sum, count, norm_value = torch.cat(
            [sums, items.reshape(1), whole_norm.detach().to(torch.float64).reshape(1)]
        ).tolist()
        self._sums.zero_()
        loss = total / count if count else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            self._refuse_step(model, loss, norm_value)
        self._numbers = StepNumbers(
            loss=loss,
            kd_loss=None if self.teacher is None or not self.recipe.kd_weight else kd / count,
            ce_loss=ce / count,
            grad_norm=norm_value,
            stop=int(stop_sum),
            seconds=self.watch.lap(),
        )
        return norm

    def _refuse_step(self, model: nn.Module, loss: float, norm: float) -> None:
        step = self.state.global_step + 1
        culprit = find_not_finite(self.model, loss)
        discard_running_alpha(self.model)
        good, _ = self.checkpoints.newest()
        kept = f"the last good checkpoint is {good}" if good else "no checkpoint was written yet"
        raise NotFiniteError(
            f"step {step}: {culprit} is not finite (loss {loss:g}, gradient norm {norm:g}); stopped before the "
            f"optimizer was called, {kept}"
        )

    # After a step

    def _maybe_log_save_evaluate(self, *_: Any, learning_rate: float | None = None, **__: Any) -> None:
        if self._numbers is None:
            return  # Trainer calls once more at the end of an epoch, without a step
        numbers, self._numbers = self._numbers, None
        step, recipe = self.state.global_step, self.recipe
        last = step >= recipe.steps
        speed = recipe.tokens_per_step / numbers.seconds
        entry: dict[str, Any] = {
            "step": step,
            "loss": numbers.loss,
            "kd_loss": numbers.kd_loss,
            "ce_loss": numbers.ce_loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": learning_rate,
            "tokens": step * recipe.tokens_per_step,
            "tokens_per_second": speed,
            "mfu": self.utilisation(speed),
            "seconds": self.watch.seconds,
        }
        with self.watch.stopped():
            if recipe.probe_every and (step == 1 or last or step % recipe.probe_every == 0):
                entry |= self.probe()
            if self.heldout is not None and (last or (recipe.eval_every and step % recipe.eval_every == 0)):
                entry |= self.evaluate()
            self._record(entry)
            if last or numbers.stop or (recipe.save_every and step % recipe.save_every == 0):
                self._save_checkpoint(self.model, None)
        if numbers.stop and not last:
            # Two ranks with one signal each add up; which one it was matters only to the exit code.
            self.stopped_by = max(of_all_ranks(self.signals.number))
            self.control.should_training_stop = True

    def _record(self, entry: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            self.step_log.add(entry)
            if self.progress is not None:
                self.progress.add(entry)
            if self.on_step is not None:
                self.on_step(entry)
        self.log({key: value for key, value in entry.items() if isinstance(value, float) and key != "seconds"})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """For TensorBoard and its like. Trainer's own history would grow with every checkpoint; log.jsonl holds it."""
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    @torch.no_grad()
    def probe(self) -> dict[str, Any]:
        """Logits, alphas and gates on two held-out sequences; every rank must call. Changes nothing, draws nothing."""
        if self.heldout is None:
            return {}
        batch = collate([self.heldout[item] for item in range(min(PROBED, len(self.heldout)))])
        inputs = {key: value.to(self.args.device) for key, value in batch.items() if key != "labels"}
        model = self.model
        model.eval()
        try:
            with Probe(model) as probe:
                model(**inputs, use_cache=False, logits_to_keep=1)
            return probe.result()
        finally:
            model.train()

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The training loss on held-out text, exact over ragged masks and ranks; every rank must call."""
        assert self.heldout is not None
        count, rank, ranks = min(EVALUATED, len(self.heldout)), self.args.process_index, self.args.world_size
        size = self.args.per_device_train_batch_size
        # All ranks run as many batches, as FSDP2 needs, and a compiled model batches of one size: what they lack is
        # filled up with text that does not count.
        whole = ranks * size if self.recipe.compile else ranks
        mine = range(rank, math.ceil(count / whole) * whole, ranks)
        sums = torch.zeros(4, dtype=torch.float64, device=self.args.device)
        model = self.model
        model.eval()
        try:
            for first in range(0, len(mine), size):
                batch = collate([self._heldout_item(item, count) for item in mine[first : first + size]])
                inputs = {key: value.to(self.args.device) for key, value in batch.items()}
                parts = self.loss(model, self.teacher, inputs)
                kd_sum = torch.zeros_like(parts.ce_sum) if parts.kd_sum is None else parts.kd_sum
                sums[:3] += torch.stack([parts.total_sum, kd_sum, parts.ce_sum])
                sums[3] += (inputs["labels"][:, 1:] != -100).sum()
        finally:
            model.train()
        if ranks > 1:
            torch.distributed.all_reduce(sums)
        total, kd, ce, tokens = sums.tolist()
        if not tokens:
            return {}
        parts_seen = {"eval_ce_loss": ce / tokens}
        if self.teacher is not None and self.recipe.kd_weight:
            parts_seen["eval_kd_loss"] = kd / tokens
        return {"eval_loss": total / tokens} | parts_seen

    def _heldout_item(self, item: int, count: int) -> dict[str, Tensor]:
        example = dict(self.heldout[min(item, count - 1)])
        if item >= count:
            example["labels"] = torch.full_like(example["labels"], -100)
        return example

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes the state after this step; every rank must call, rank 0 writes."""
        step = self.state.global_step
        optimizer_tensors, optimizer_groups = optimizer_state(self.model, self.optimizer)
        model_tensors = weights(self.model)
        gathering = Gathering([*model_tensors.values(), *optimizer_tensors.values()])
        stream = self.train_dataset
        training = {
            "optimizer": optimizer_groups,
            "scheduler": self.lr_scheduler.state_dict(),
            "seconds": self.watch.seconds,
            "random": of_all_ranks(random_state()),
            "stream": stream.position_after(step) if isinstance(stream, ResumableStream) else None,
        }
        error: Exception | None = None
        if self.is_world_process_zero():
            try:
                self.step_log.sync()
                with self.checkpoints.writing(step) as draft:
                    self.model.config.save_pretrained(draft.path)
                    self.state.save_to_json(str(draft.path / "trainer_state.json"))
                    draft.adopt()
                    draft.write_tensors("model.safetensors", model_tensors.items(), gathering.fetch)
                    draft.write_tensors("optimizer.safetensors", optimizer_tensors.items(), gathering.fetch)
                    draft.write_json("training.json", training)
                self.run.add_event("save", step=step, checkpoint=self.checkpoints.path(step).name)
            except Exception as caught:
                error = caught
        gathering.finish()
        failed = of_all_ranks(None if error is None else str(error))
        if error is not None:
            raise error
        if any(failed):
            raise CheckpointError(f"rank 0 could not save: {failed[0]}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = Path(resume_from_checkpoint)
        load_weights(self.model if model is None else model, read_tensors(path / "model.safetensors"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = Path(checkpoint)
        training = read_json(path / "training.json")
        load_optimizer_state(
            self.model, self.optimizer, read_tensors(path / "optimizer.safetensors"), training["optimizer"]
        )
        check_schedule(training["scheduler"], plain_numbers(self.lr_scheduler.state_dict()))
        self.lr_scheduler.load_state_dict(training["scheduler"])
        self.watch.seconds = training["seconds"]

    def go_on_from(self, checkpoint: Path) -> None:
        """Trains from a checkpoint to the end. A stream goes to its place; other data is skipped by counting."""
        if isinstance(self.train_dataset, ResumableStream):
            training = read_json(checkpoint / "training.json")
            self.train_dataset.resume_after(
                read_json(checkpoint / "trainer_state.json")["global_step"], training["stream"]
            )
            self.args.ignore_data_skip = True
            self._random_of = str(checkpoint)
        self.train(resume_from_checkpoint=str(checkpoint))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Opening a loader draws a random number, which the run before the checkpoint had drawn at its start."""
        samples = super().get_batch_samples(*args, **kwargs)
        if self._random_of is not None:
            self._load_rng_state(self._random_of)
            self._random_of = None
        return samples

    def _load_scaler(self, checkpoint: str | None) -> None:
        """There is none: bfloat16 needs no loss scaling."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = read_json(Path(checkpoint) / "training.json")["random"]
        if self.args.process_index < len(states):
            set_random_state(states[self.args.process_index])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Nothing where the last step is done: a run may come back for its model alone, and a stream is at its end."""
        if self.state.global_step >= self.recipe.steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # Newer torch has another name for it, which the oldest that we support does not know.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_world_process_zero():
            self.on_ready()
        if self.progress is not None:
            self.progress.start(self.state.global_step)
        self.watch.start()
        return prepared
