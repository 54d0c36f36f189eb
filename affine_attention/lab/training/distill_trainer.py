"""Hugging Face's Trainer with our loss, log and checkpoints.

Trainer provides the loop, accumulation, mixed precision, activation checkpointing, DDP and FSDP2. This class adds the
loss (sums over tokens, so that micro-batches and ranks add up), one log entry per step, a check that loss and gradients
are finite before the optimizer runs, and atomic checkpoints.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainingArguments

from ...files import plain_numbers, read_json
from ...hf import RunningAlphaCallback
from ...nn import discard_running_alpha
from ..data import collate
from ..inspection.capture import Probe
from ..recipe import Recipe
from ..run import RunFolder
from .checkpoints import CheckpointError, Checkpoints
from .contents import check_schedule
from .nonfinite import NotFiniteError, find_not_finite
from .pressure import SinkPressure
from .progress import Progress
from .sequence_split import SequenceSplit
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

PROBED = 2  # held-out sequences per probe
EVALUATED = 256  # maximum number of held-out sequences per evaluation


class StepNumbers(NamedTuple):
    """The numbers of a step, copied to the host in one transfer before the optimizer runs."""

    loss: float
    kd_loss: float | None
    ce_loss: float
    grad_norm: float  # before clipping
    stop: int  # sum over ranks of received signal numbers, 0 for none
    seconds: float


class DistillTrainer(Trainer):
    """Trains the student of a recipe in a run folder.

    Args:
        recipe: the settings of the run.
        run: the run folder, for log and events.
        student: the model to train.
        arguments: created by `trainer_arguments.training_arguments`.
        train_dataset: sequences in their final order.
        heldout: held-out sequences, or None.
        teacher: on the student's device, in evaluation mode; None for plain cross-entropy.
        sequence: the sequence groups of the ranks, or None if each rank holds whole sequences.
        tokenizer: its special tokens are copied to the model's configuration.
        checkpoints: the checkpoints of the run.
        signals: recorded stop signals; the run stops after the current step.
        progress: the progress bar.
        utilisation: tokens per second -> MFU, or None if the peak is unknown.
        on_step: called on rank 0 with each entry of the log.
        on_ready: called on rank 0 before the first step, after a checkpoint was loaded.
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
        sequence: SequenceSplit | None = None,
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
        # The loss is a sum over labels[:, 1:], divided by Trainer's count of these labels over all micro-batches and
        # ranks. Without these two attributes, Trainer would divide again by the number of micro-batches.
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        self.recipe, self.run, self.teacher, self.heldout = recipe, run, teacher, heldout
        self.sequence = sequence
        self.loss, self.pressure = make_loss(recipe), SinkPressure(recipe)
        self.checkpoints, self.signals = checkpoints, signals or StopSignals()
        self.progress = progress or Progress(recipe.steps, shown=False)
        self.step_log, self.watch, self.utilisation = StepLog(run.log_file), Stopwatch(), utilisation
        self.on_step, self.on_ready = on_step or (lambda entry: None), on_ready
        self.stopped_by = 0
        self._sums = torch.zeros(3, dtype=torch.float64, device=self.args.device)  # total, kd, ce of one step
        self._items: Tensor | int = 0
        self._numbers: StepNumbers | None = None
        self._random_of: str | None = None  # a checkpoint whose random state must still be restored

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if self.pressure.applies(self.state.global_step + 1):
            inputs = self.pressure.hide(inputs)
        assert num_items_in_batch is not None, "every batch has labels"
        if self.sequence is not None:
            inputs = self.sequence.part(inputs, self.loss, self.teacher)
            # Each rank of a group counts the same batch. Not in place: all micro-batches of a step share the tensor.
            num_items_in_batch = num_items_in_batch // self.sequence.size
        parts = self.loss(model, self.teacher, inputs)
        self._sums += parts.stacked()
        self._items = num_items_in_batch
        # DDP and FSDP2 average gradients over ranks, but the loss is a sum over ranks.
        return parts.total_sum * (self.accelerator.num_processes / num_items_in_batch)

    def get_train_dataloader(self) -> Any:
        if self.sequence is None:
            return super().get_train_dataloader()
        assert self.train_dataset is not None
        loader: Any = torch.utils.data.DataLoader(
            self.train_dataset, batch_size=self._train_batch_size, shuffle=False, collate_fn=collate,
            pin_memory=self.args.dataloader_pin_memory,
        )  # fmt: skip
        return self.sequence.loader(loader, self.args.device)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Weight decay applies to matrices (embeddings, Linears, W_a, W_g), not to vectors (norms, biases, sinks)."""
        return [name for name, parameter in model.named_parameters() if parameter.dim() >= 2]

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: Trainer would iterate over all modules for every micro-batch."""
        return 0

    def store_flos(self) -> None:
        """See `floating_point_ops`."""

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = self._finish_backward(model)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._finish_backward(model) if grad_norm is None else grad_norm

    def _finish_backward(self, model: nn.Module) -> Tensor:
        """Copies the step's numbers to the host, and raises before the optimizer runs if one of them is not finite."""
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        stop = torch.full((1,), self.signals.number, dtype=torch.float64, device=self._sums.device)
        sums = torch.cat([self._sums, stop])
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        items = torch.as_tensor(self._items, dtype=torch.float64, device=self._sums.device)
        # One transfer, because each transfer synchronises with the device.
        total, kd, ce, stop_sum, count, norm_value = torch.cat(
            [sums, items.reshape(1), whole_norm.detach().to(torch.float64).reshape(1)]
        ).tolist()
        self._sums.zero_()
        loss = total / count if count else math.nan
        if not (math.isfinite(loss) and math.isfinite(norm_value)):
            self._raise_not_finite(loss, norm_value)
        self._numbers = StepNumbers(
            loss=loss,
            kd_loss=None if self.teacher is None or not self.recipe.kd_weight else kd / count,
            ce_loss=ce / count,
            grad_norm=norm_value,
            stop=int(stop_sum),
            seconds=self.watch.lap(),
        )
        return norm

    def _raise_not_finite(self, loss: float, norm: float) -> None:
        step = self.state.global_step + 1
        culprit = find_not_finite(self.model, loss)
        discard_running_alpha(self.model)
        good, _ = self.checkpoints.newest()
        kept = f"the last valid checkpoint is {good}" if good else "no checkpoint was written yet"
        raise NotFiniteError(
            f"step {step}: {culprit} is not finite (loss {loss:g}, gradient norm {norm:g}); stopped before the "
            f"optimizer step, {kept}"
        )

    def _maybe_log_save_evaluate(self, *_: Any, learning_rate: float | None = None, **__: Any) -> None:
        if self._numbers is None:
            return  # Trainer also calls this at the end of an epoch, without a step
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
        } | self.pressure.log(step)
        with self.watch.stopped():
            if recipe.probe_every and (step == 1 or last or step % recipe.probe_every == 0):
                entry |= self.probe()
            if self.heldout is not None and (last or (recipe.eval_every and step % recipe.eval_every == 0)):
                entry |= self.evaluate()
            self._record(entry)
            if last or numbers.stop or (recipe.save_every and step % recipe.save_every == 0):
                self._save_checkpoint(self.model, None)
        if numbers.stop and not last:
            # numbers.stop is a sum over ranks; the exit code needs the number of one signal.
            self.stopped_by = max(of_all_ranks(self.signals.number))
            self.control.should_training_stop = True

    def _record(self, entry: dict[str, Any]) -> None:
        if self.is_world_process_zero():
            self.step_log.add(entry)
            self.progress.add(entry)
            self.on_step(entry)
        self.log({key: value for key, value in entry.items() if isinstance(value, float) and key != "seconds"})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Calls integrations such as TensorBoard. Trainer's own history, stored in every checkpoint, is not used."""
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    @torch.no_grad()
    def probe(self) -> dict[str, Any]:
        """Logits, alphas and gates on two held-out sequences; every rank must call. Does not change any state."""
        if self.heldout is None:
            return {}
        batch = collate([self.heldout[item] for item in range(min(PROBED, len(self.heldout)))])
        inputs = {key: value.to(self.args.device) for key, value in batch.items() if key != "labels"}
        model = self.model
        model.eval()
        try:
            whole = nullcontext() if self.sequence is None else self.sequence.whole()
            with whole, Probe(model) as probe:
                model(**inputs, use_cache=False, logits_to_keep=1)
            return probe.result()
        finally:
            model.train()

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The training loss on held-out text, averaged over all tokens of all ranks; every rank must call."""
        assert self.heldout is not None
        count, rank, ranks = min(EVALUATED, len(self.heldout)), self.args.process_index, self.args.world_size
        if self.sequence is not None:
            rank, ranks = self.sequence.data_rank, self.sequence.data_ranks
        size = self.args.per_device_train_batch_size
        # FSDP2 needs the same number of batches on every rank, and a compiled model needs full batches: the rest is
        # padded with sequences whose labels are ignored.
        whole = ranks * size if self.recipe.compile else ranks
        mine = range(rank, math.ceil(count / whole) * whole, ranks)
        sums = torch.zeros(4, dtype=torch.float64, device=self.args.device)
        model = self.model
        model.eval()
        try:
            for first in range(0, len(mine), size):
                batch = collate([self._heldout_item(item, count) for item in mine[first : first + size]])
                inputs = {key: value.to(self.args.device) for key, value in batch.items()}
                labels = inputs["labels"][:, 1:]
                if self.sequence is not None:
                    inputs = self.sequence.part(inputs, self.loss, self.teacher)
                    labels = inputs["shift_labels"]
                parts = self.loss(model, self.teacher, inputs)
                sums[:3] += parts.stacked()
                sums[3] += (labels != -100).sum()
        finally:
            model.train()
        if self.args.world_size > 1:
            torch.distributed.all_reduce(sums)
        total, kd, ce, tokens = sums.tolist()
        if not tokens:
            return {}
        has_kd = self.teacher is not None and self.recipe.kd_weight
        losses = {"eval_loss": total / tokens, "eval_ce_loss": ce / tokens}
        return losses | ({"eval_kd_loss": kd / tokens} if has_kd else {})

    def _heldout_item(self, item: int, count: int) -> dict[str, Tensor]:
        example = dict(self.heldout[min(item, count - 1)])
        if item >= count:
            example["labels"] = torch.full_like(example["labels"], -100)
        return example

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes a checkpoint of this step; every rank must call, rank 0 writes."""
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
                    draft.add_existing_files()
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

    def resume_from(self, checkpoint: Path) -> None:
        """Trains from a checkpoint to the end. A stream continues at its position; other data is skipped by index."""
        if isinstance(self.train_dataset, ResumableStream):
            training = read_json(checkpoint / "training.json")
            self.train_dataset.resume_after(
                read_json(checkpoint / "trainer_state.json")["global_step"], training["stream"]
            )
            self.args.ignore_data_skip = True
            self._random_of = str(checkpoint)
        self.train(resume_from_checkpoint=str(checkpoint))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Restores the random state after the loader was opened, because opening it draws a random number."""
        samples = super().get_batch_samples(*args, **kwargs)
        if self._random_of is not None:
            self._load_rng_state(self._random_of)
            self._random_of = None
        return samples

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Does nothing: bfloat16 needs no loss scaling."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = read_json(Path(checkpoint) / "training.json")["random"]
        if self.args.process_index < len(states):
            set_random_state(states[self.args.process_index])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Skips training if all steps are done: the run was resumed only to write its model."""
        if self.state.global_step >= self.recipe.steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with warnings.catch_warnings():
            # Newer torch versions renamed it; the oldest supported version has only the old name.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            prepared = super()._prepare_for_training(*args, **kwargs)
        if self.is_world_process_zero():
            self.on_ready()
        self.progress.start(self.state.global_step)
        self.watch.start()
        return prepared
