"""The training run: epochs of steps, with history, checkpoints and an exact way back."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.data.splits import Splits
from attnrx.errors import DataError, InvalidInput, TrainingDiverged, TrainingInterrupted
from attnrx.models import load_model, save_model
from attnrx.storage import check_schema, read_json, write_json
from attnrx.training.checkpoints import Checkpoints
from attnrx.training.config import TrainingConfig
from attnrx.training.evaluation import Score, evaluate
from attnrx.training.history import History
from attnrx.training.identity import identity, require_same
from attnrx.training.interruption import Interruption, interruptible
from attnrx.training.optimization import load_optimizer_, optimizer_tensors
from attnrx.training.preparation import prepare, require_fit
from attnrx.training.provenance import provenance
from attnrx.training.randomness import EPOCH, derived_seed, reproducible
from attnrx.training.reporters import Outline, Reporter, Silent, default_reporter
from attnrx.training.stepping import Learner

KIND, SCHEMA = "attnrx training run", 1
CHECK_EVERY = 16  # steps between looks at a GPU or at other processes, each of which makes the step wait


@dataclass(frozen=True)
class TrainingRun:
    """A finished run: the model (with the averaged weights where `ema` was on), one record an epoch, and training.json."""

    model: nn.Module
    history: tuple[Mapping[str, Any], ...]
    folder: Path
    record: Mapping[str, Any]


def train(
    model: nn.Module,
    splits: Splits,
    config: TrainingConfig,
    folder: Path | str,
    *,
    resume: bool = True,
    reporter: Reporter | None = None,
) -> TrainingRun:
    """Trains the model in place and fills `folder` with the saved model, training.json, history.jsonl and checkpoints.

    A run that was interrupted or killed continues from its last checkpoint when it is asked for again, and ends bit for bit (on a
    CPU) where it would have ended; a finished one is read back. With several processes (`accelerate launch`) every process calls
    this. Ctrl-C saves a checkpoint and raises TrainingInterrupted; NaN raises TrainingDiverged.
    """
    folder = Path(folder)
    splits = require_fit(model, splits)
    asked = identity(model, splits, config)
    if not resume and (folder / "checkpoints").exists():
        raise InvalidInput(f"{folder} holds a run already: resume it, choose another folder, or delete this one.")
    finished = _finished(folder, model, asked)
    if finished is not None:
        return finished
    with reproducible(), interruptible() as interruption:
        learner = prepare(model, splits, config)
        if not learner.accelerator.is_main_process:
            reporter = Silent()
        return _Run(learner, splits, folder, asked, reporter or default_reporter()).make(interruption)


def _finished(folder: Path, model: nn.Module, asked: Mapping[str, Any]) -> TrainingRun | None:
    path = folder / "training.json"
    if not path.exists():
        return None
    record = read_json(path)
    check_schema(record, KIND, SCHEMA, path)
    require_same(record["identity"], asked, folder)
    model.load_state_dict(load_model(folder).state_dict())
    history = History(folder)
    history.restore(record["identity"]["config"]["epochs"])
    return TrainingRun(model.eval(), tuple(history.records), folder, record)


class _Run:
    """The loop. `step` counts the finished steps of the whole run; epoch and position in it follow from that."""

    def __init__(self, learner: Learner, splits: Splits, folder: Path, asked: Mapping[str, Any], reporter: Reporter):
        self.learner, self.splits, self.folder, self.asked, self.reporter = learner, splits, folder, asked, reporter
        self.checkpoints, self.history = Checkpoints(folder), History(folder)
        self.accelerator, self.config = learner.accelerator, learner.config
        self.step, self.seconds, self.began = 0, 0.0, time.perf_counter()
        self.check_every = 1 if self.accelerator.device.type == "cpu" and learner.shard[1] == 1 else CHECK_EVERY

    def make(self, interruption: Interruption) -> TrainingRun:
        self._restore_()
        schedule = self.learner.schedule
        self.reporter.started(Outline(self.config.epochs, schedule.steps_per_epoch, self.step))
        try:
            while self.step < schedule.steps:
                self._epoch_(interruption)
            return self._finish_()
        finally:
            self.reporter.ended()

    def _epoch_(self, interruption: Interruption) -> None:
        learner, per_epoch = self.learner, self.learner.schedule.steps_per_epoch
        epoch, start = divmod(self.step, per_epoch)
        began = time.perf_counter()
        learner.model.train()
        batches = self.splits.train.batches(
            self.config.batch_size,
            seed=derived_seed(self.config.seed, EPOCH, epoch),
            augmentation=self.config.augmentation or self.splits.augmentation,
            device=self.accelerator.device,
            shard=learner.shard,
            start=start,
        )
        for batch in batches:
            learner.step_(batch, self.step)
            self.step += 1
            ended = self.step % per_epoch == 0
            if self.step % self.check_every == 0 or ended or self.step % self.config.checkpoint_every == 0:
                self._check_(interruption)
            if self.step % self.config.checkpoint_every == 0 and not ended:
                self._save_()
        if self.step != (epoch + 1) * per_epoch:
            raise DataError(f"epoch {epoch + 1} gave {self.step % per_epoch} of {per_epoch} batches; the data changed.")
        self._record_(epoch, per_epoch - start, time.perf_counter() - began)
        if self.step % self.config.checkpoint_every == 0 or self.step == learner.schedule.steps:
            self._save_()

    def _check_(self, interruption: Interruption) -> None:
        """Looks whether the numbers are finite and nobody wants to stop; all processes come to the same answer."""
        first_bad, wanted = self.learner.first_bad, float(interruption.wanted)
        if self.learner.shard[1] > 1:
            signs = torch.stack([-first_bad.double(), torch.full_like(first_bad, wanted).double()])
            signs = self.accelerator.gather(signs[None]).amax(0)  # type: ignore[union-attr]
            first_bad, wanted = -signs[0], float(signs[1])
        if first_bad < self.step:
            raise self._diverged(int(first_bad))
        if wanted:
            path = self._save_()
            raise TrainingInterrupted(
                f"training stopped after step {self.step} of {self.learner.schedule.steps}; everything is in {path}. "
                "Run the same command again to continue."
            )
        if self.accelerator.is_main_process:
            totals = self.learner.meter.totals()
            self.reporter.stepped(self.step, totals["loss"] / max(1.0, totals["steps"]))

    def _diverged(self, step: int) -> TrainingDiverged:
        found = self.checkpoints.all()
        good = f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
        rate = self.learner.schedule.rate(step)
        return TrainingDiverged(
            f"the loss or the gradient was NaN or infinite at step {step}, with a learning rate of {rate:.3g}; {good}. "
            "Train again with a lower learning rate, a longer warm-up or stronger clipping."
        )

    def _record_(self, epoch: int, steps: int, seconds: float) -> None:
        learner = self.learner
        sums = self.accelerator.reduce(learner.meter.sums, "sum")
        totals = learner.meter.totals(sums)  # type: ignore[arg-type]
        with learner.mean.in_place() if learner.mean else nullcontext():
            score = self._score(self.splits.validation)
        names = [loss.name for loss in self.config.losses]
        record = {
            "epoch": epoch + 1,
            "step": self.step,
            "learning_rate": learner.schedule.rate(self.step - 1),
            **{name: totals[name] / totals["steps"] for name in ("loss", "gradient_norm")},
            "losses": {name: totals[name] / totals["steps"] for name in names},
            "accuracy": totals["correct"] / totals["images"],
            "validation_accuracy": score.accuracy,
            "validation_loss": score.loss,
            "seconds": seconds,
            "images_per_second": steps * self.config.batch_size / seconds,
        }
        learner.meter.reset_()
        self.history.records.append(record)
        if self.accelerator.is_main_process:
            self.history.write()
            self.reporter.epoch_ended(record)

    def _score(self, images) -> Score:
        learner = self.learner
        return evaluate(learner.model, images, self.config.batch_size, self.accelerator, learner.autocast)

    def _save_(self) -> Path:
        """Writes a checkpoint from the first process, while the others wait."""
        learner = self.learner
        sums = self.accelerator.reduce(learner.meter.sums, "sum")
        path = self.checkpoints.folder / f"step-{self.step:08d}"
        if self.accelerator.is_main_process:
            tensors = {f"model/{name}": tensor for name, tensor in learner.model.state_dict().items()}
            tensors |= {f"optimizer/{k}": v for k, v in optimizer_tensors(learner.model, learner.optimizer).items()}
            tensors |= {f"mean/{k}": v for k, v in (learner.mean.tensors if learner.mean else {}).items()}
            tensors["meter"] = sums  # type: ignore[assignment]
            seconds = self.seconds + time.perf_counter() - self.began
            path = self.checkpoints.write(self.step, tensors, {"identity": self.asked, "seconds": seconds})
        self.accelerator.wait_for_everyone()
        return path

    def _restore_(self) -> None:
        found = self.checkpoints.read()
        if found is None:
            return
        state, tensors = found
        require_same(state["identity"], self.asked, self.folder)
        parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}, "mean": {}}
        meter = tensors.pop("meter")
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            parts[kind][rest] = tensor
        learner = self.learner
        learner.model.load_state_dict(parts["model"])
        load_optimizer_(learner.model, learner.optimizer, parts["optimizer"])
        if learner.mean is not None:
            learner.mean.load_(parts["mean"])
        if self.accelerator.is_main_process:  # the sums of all processes: held by one of them
            learner.meter.sums.copy_(meter)
        self.step, self.seconds = state["step"], state["seconds"]
        self.history.restore(self.step // learner.schedule.steps_per_epoch, write=self.accelerator.is_main_process)

    def _finish_(self) -> TrainingRun:
        learner = self.learner
        model = learner.model
        if learner.mean is not None:
            learner.mean.store_()
        model.eval()
        test = self._score(self.splits.test)
        best = max(self.history.records, key=lambda record: record["validation_accuracy"])
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "identity": self.asked,
            "accuracy": {
                "test": test.accuracy,
                "validation": self.history.records[-1]["validation_accuracy"],
                "best_validation": best["validation_accuracy"],
                "best_epoch": best["epoch"],
            },
            "steps": self.step,
            "seconds": self.seconds + time.perf_counter() - self.began,
            "notes": list(self.splits.notes),
            **provenance(self.accelerator),
        }
        if self.accelerator.is_main_process:
            save_model(self.folder, model, {"trained_on": self.splits.name, "accuracy": record["accuracy"]})
            write_json(self.folder / "training.json", record)
        self.accelerator.wait_for_everyone()
        return TrainingRun(model, tuple(self.history.records), self.folder, record)
