"""The training loop, which records every epoch, writes checkpoints, and resumes interrupted runs exactly.

The data and the processes are checked before the first step, so that wrong settings do not waste training time.
"""

import copy
import json
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from attnrx.data import ImageSet, Splits, require_labels
from attnrx.data.model_data import normalization_of, num_classes, splits_for
from attnrx.support import arguments as kinds
from attnrx.support.arguments import checked
from attnrx.support.errors import DataError, InvalidInput, NotSupported, TrainingDiverged, TrainingInterrupted
from attnrx.support.hardware import device_name
from attnrx.support.optional import installed_versions, required_module
from attnrx.support.progress import Log, no_log, track
from attnrx.support.shapes import Tensor
from attnrx.support.signals import STOPPING, handling
from attnrx.support.storage import fingerprint, read_record, write_json, write_text
from attnrx.training.checkpoints import (
    HISTORY,
    IDENTITY,
    Checkpoints,
    identity,
    load_state_,
    load_tensors_,
    require_same_run,
    state_tensors,
)
from attnrx.training.config import TrainingConfig
from attnrx.training.losses import load_teachers
from attnrx.training.step import EPOCH, Learner, derived_seed, gather_tensors, gathered_weights
from attnrx.vit.models import (
    answer,
    family_of,
    library_form,
    load_model,
    num_outputs,
    recording_blocks,
    require_model_folder,
    require_ordinary_weights,
    save_model,
)
from attnrx.vit.models.parts.record import record_of

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

KIND, SCHEMA = "attnrx training run", 1
ONE_COPY = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU")  # distributed types of Accelerate that do not shard the model
CHECK_EVERY = 16  # steps between checks on a GPU or with several processes, where every check has to synchronize


@dataclass(frozen=True)
class TrainingRun:
    """A finished run: its trained model (with averaged weights if `ema` is set), history, folder and training.json."""

    model: nn.Module
    history: tuple[Mapping[str, Any], ...]
    folder: Path
    record: Mapping[str, Any]


@checked()
def train(model: nn.Module, data: Any, config: TrainingConfig, folder: Path | str, *, log: Log = no_log) -> TrainingRun:
    """Trains the model in place, and writes the model, training.json, history.jsonl and checkpoints to `folder`.

    To resume an interrupted or killed run from its last checkpoint, repeat the call. On a CPU, a resumed run gives
    bit-identical results to an uninterrupted run. If the run is already finished, the call loads its result from the
    folder. With several processes (`accelerate launch`), call this function in every process.

    On a CPU, the same call always gives the same weights, bit for bit. On CUDA, the backward pass of fused attention
    adds numbers in varying order, so runs differ by rounding. To get reproducible weights on CUDA, first call
    `torch.use_deterministic_algorithms(True)`. Operations without a deterministic algorithm then raise an error.

    Args:
        model: The model, of any family that `load` supports. Parameters with `requires_grad=False` are not trained.
        data: `Splits`, a dataset, or a mapping from "train", "validation" and "test" to data.
        config: The settings of the run.
        folder: The folder of the run. It is created if it does not exist.
        log: A function that the main process calls with a line of text after every epoch.

    Returns:
        The trained model with its history and record.

    Raises:
        InvalidInput: The data do not fit the model or the batch size, or no parameter requires a gradient.
        DataError: Images or labels are missing.
        CheckpointError: The folder contains a run with another model, config or data, or a damaged checkpoint.
        NotSupported: A setting does not apply to this model, or `train` does not support the processes' parallel mode.
        TrainingInterrupted: Ctrl-C, SIGTERM or SIGHUP stopped the run, and a checkpoint was written.
        TrainingDiverged: The loss or a gradient is not finite.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)
        >>> splits = rx.adapt_preprocessing(rx.load_data("digits"), model)
        >>> run = rx.train(model, splits, rx.TrainingConfig(epochs=1, batch_size=128), "runs/digits")
    """
    folder, splits = Path(folder), splits_for(model, data, training=True)
    splits = adapt_data(model, splits, config)
    teachers = load_teachers(config.losses)
    requested = identity(model, splits, config, teachers)
    # A finished run is loaded before the accelerator is created, because it needs no processes.
    finished = _finished(folder, model, requested)
    if finished is not None:
        return finished
    # The folder is checked before training, because the model is only written at the end.
    require_model_folder(folder, ("config.json", "model.safetensors", "training.json"))
    accelerator = make_accelerator(model, config)
    # Sharding cannot be undone, so a copy is sharded, and its weights are loaded into the model at the end.
    sharded = config.parallel == "fsdp" and accelerator.num_processes > 1
    trained_model = copy.deepcopy(model) if sharded else model
    needs_features = any(loss.reads_features for loss in config.losses)
    recording = recording_blocks(trained_model, family_of(trained_model)) if needs_features else nullcontext()
    with deterministic(), recording as features, interruptible() as interruption:
        learner = Learner(model, trained_model, len(splits.train), config, accelerator, features, teachers)
        log = log if accelerator.is_main_process else no_log
        return _Run(learner, splits, folder, requested, log).complete(interruption)


def _finished(folder: Path, model: nn.Module, requested: Mapping[str, Any]) -> TrainingRun | None:
    path = folder / "training.json"
    if not path.exists():
        return None
    record = read_record(path, KIND, SCHEMA, kinds.record({"identity": IDENTITY}, HISTORY, open=True))
    saved = load_model(folder)
    trained = (saved if record_of(model) is None else library_form(saved)).state_dict()
    require_same_run(record["identity"], requested, folder, fingerprint(trained))
    # The weights are loaded into the caller's model, because training also changes it in place.
    model.load_state_dict(trained)
    return TrainingRun(model.eval(), tuple(record.get("history", ())), folder, record)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Yields an event that is set on Ctrl-C, termination or a closed terminal, so that the current step can finish.

    If the event is set when the context ends, the context raises KeyboardInterrupt. A second signal raises
    KeyboardInterrupt immediately, without a new checkpoint. Outside the main thread, signals are not handled.
    """
    interruption = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if interruption.is_set():
            raise KeyboardInterrupt
        interruption.set()

    with handling(STOPPING, handle):
        yield interruption
    if interruption.is_set():
        raise KeyboardInterrupt


@contextmanager
def deterministic() -> Iterator[None]:
    """Prefers deterministic algorithms within the context, and restores settings and generator states at the end.

    On CUDA, the backward pass of fused attention is deterministic only if PyTorch forbids nondeterministic algorithms.
    attnrx does not forbid them, because operations that have no deterministic algorithm would then fail. You can forbid
    them with `torch.use_deterministic_algorithms(True)`. Otherwise, PyTorch warns once about the backward pass.
    """
    debugging: Any = torch.utils.deterministic  # its attribute is set at run time, unknown to type checkers
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = debugging.fill_uninitialized_memory
    # Only this process's device is forked, because forking the generators of all devices would initialize the devices.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            torch.use_deterministic_algorithms(True, warn_only=warn_only or not was_deterministic)
            debugging.fill_uninitialized_memory = False  # this debugging aid costs a pass over memory
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic, warn_only=warn_only)
            debugging.fill_uninitialized_memory = fill


def adapt_data(model: nn.Module, splits: Splits, config: TrainingConfig) -> Splits:
    """Checks that the data fit the model and the batch size, and returns the data, normalized as the model expects.

    If a loss uses labels, every training image must have a label, and the label must be a class of the model. If no
    loss uses labels, images need no labels, and the data may have fewer classes than the model.

    Raises:
        InvalidInput: The batch size is larger than the training set, or the images or classes do not fit the model.
        DataError: A loss uses labels, but the images have no labels, or labels that are not classes of the model.
    """
    if config.batch_size > len(splits.train):
        raise InvalidInput(
            f"batch_size={config.batch_size} is more than the {len(splits.train)} training images of {splits.name}; "
            "give a smaller one."
        )
    require_ordinary_weights(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidInput("no parameter of the model requires a gradient: set requires_grad_(True) for some.")
    # The first image determines the shape, because a user's data do not declare it.
    shape, actual = family_of(model).input_shape(model), next(splits.train.take(1).batches(1)).images.shape[1:]
    if shape != tuple(actual):
        raise InvalidInput(
            f"the model takes images of {shape} (channels, height, width) and {splits.name} has {tuple(actual)}; "
            "load the data with the model's image_size, or build the model for this data."
        )
    classes, num_named = num_logits(model), len(splits.class_names)
    if not classes and config.reads_labels:
        raise InvalidInput(
            f"the losses {', '.join(loss.name for loss in config.losses if loss.reads_labels)} read labels, and the "
            "model has no classifier; train it with a teacher only, e.g. FeatureDistillation, or give it a classifier."
        )
    # A model may distinguish two classes by one logit, but the losses need one logit per class.
    if classes and (num_classes(model) < num_named or (config.reads_labels and classes != num_named)):
        raise InvalidInput(
            f"the model has {classes} classes and {splits.name} has {num_named}; build the model for this data, or "
            "train with a teacher only, without the task loss."
        )
    if config.reads_labels:
        require_labels(splits.train)
        splits = replace(splits, train=splits.train.limited_to(classes))
    normalization = normalization_of(model)
    return splits if normalization == splits.normalization else splits.renormalized(normalization)


def num_logits(model: nn.Module) -> int:
    """Returns the number of logits per image, or 0 for a model without a classifier."""
    heads = family_of(model).heads(model)
    return num_outputs(heads[0]) if heads else 0


def connect_processes(**settings: Any) -> "PartialState":
    """Connects the launched processes with each other if needed, and returns Accelerate's object for their state.

    `settings` are arguments of `torch.distributed.init_process_group`.
    """
    accelerate = required_module("accelerate", "train", "training")
    # Without a GPU, Accelerate only connects processes if `cpu` is set. Otherwise each process would train on its own.
    cpu = not torch.accelerator.is_available() or accelerate.utils.parse_flag_from_env("ACCELERATE_USE_CPU")
    return accelerate.PartialState(cpu=cpu, **settings)


def make_accelerator(model: nn.Module, config: TrainingConfig) -> "Accelerator":
    """Returns the `Accelerator` for the launched processes, after checking their parallel mode and their number.

    Raises:
        NotSupported: The processes were launched in a parallel mode that attnrx does not support.
        InvalidInput: The batch size is not a multiple of the number of processes times `accumulate`.
    """
    # If the heads of a layer have no directions, the layer has empty parameters, which are not used. For unused
    # parameters, DDP requires a flag.
    unused = any(not parameter.numel() for parameter in model.parameters())
    # Mixed precision is off here, because the config sets it. So a run does not depend on how it was launched.
    accelerate = required_module("accelerate", "train", "training")
    connect_processes()
    parallel = accelerate.DistributedDataParallelKwargs(find_unused_parameters=unused)
    accelerator = accelerate.Accelerator(mixed_precision="no", kwargs_handlers=[parallel])
    if accelerator.distributed_type.value not in ONE_COPY:
        raise NotSupported(
            f"the processes were launched for {accelerator.distributed_type.value}; launch plain data parallel "
            'processes, and set parallel="fsdp" (--parallel fsdp) for sharded weights.'
        )
    if config.batch_size % (accelerator.num_processes * config.accumulate):
        parts = f", each in {config.accumulate} parts (accumulate)" if config.accumulate > 1 else ""
        raise InvalidInput(
            f"batch_size={config.batch_size} cannot be divided between {accelerator.num_processes} processes{parts}; "
            "give a multiple of their number."
        )
    return accelerator


@torch.no_grad()
def evaluate(learner: Learner, images: ImageSet | None) -> tuple[float, float] | tuple[None, None]:
    """Returns the accuracy and the mean cross-entropy over all images, which are divided among the processes.

    Processes may get different numbers of images. Both results are None if `images` is None, e.g. because the
    split has no labels.
    """
    if images is None:
        return None, None
    accelerator, model = learner.accelerator, learner.model
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    model.eval()
    with gathered_weights(model):
        for batch in images.batches(learner.config.batch_size, device=accelerator.device, shard=learner.shard):
            with learner.autocast():
                logits = answer(model, batch.images.to(learner.dtype))
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            losses = nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
            num_correct = (logits.argmax(-1) == batch.labels).sum()
            # Sums and not means are added up, because the last batch of a process may be smaller or missing.
            sums += torch.stack([num_correct, losses, torch.tensor(len(batch)).to(losses)])
    correct, loss, count = learner.summed(sums).tolist()
    return correct / count, loss / count


class _Run:
    """The training loop.

    `step` is the number of steps that the whole run has finished. The epoch and the position in it follow from `step`.
    """

    def __init__(self, learner: Learner, splits: Splits, folder: Path, requested: Mapping[str, Any], log: Log):
        self.learner, self.splits, self.folder, self.requested = learner, splits, folder, requested
        self.log, self.steps_per_epoch = log, learner.schedule.steps_per_epoch
        self.config, self.accelerator = learner.config, learner.accelerator
        self.checkpoints, self.history = Checkpoints(folder), list[dict[str, Any]]()
        classes = num_logits(learner.target)  # the target is never sharded
        # A split is None if its accuracy cannot be measured, without labels or without one logit per class.
        self.validation, self.test = (
            images.limited_to(classes) if classes > 1 and images.label_problem is None else None
            for images in (splits.validation, splits.test)
        )
        # The learner also counts correct predictions if there are no labels. That count is then not reported.
        self.is_labelled = classes > 1 and splits.train.label_problem is None
        self.step, self.seconds, self.began = 0, 0.0, time.perf_counter()
        # On a CPU with one process, a check does not synchronize, so every step is checked.
        waits = self.accelerator.device.type != "cpu" or learner.shard[1] > 1
        self.check_every = CHECK_EVERY if waits else 1
        self._restore_()

    def _restore_(self) -> None:
        checkpoint = self.checkpoints.read()
        if checkpoint is None:
            return
        record, tensors = checkpoint
        reached = {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}
        require_same_run(record["identity"], self.requested, self.folder, fingerprint(reached))
        # Later checkpoints must still store the fingerprint of the weights before the first step.
        self.requested = {**self.requested, "weights": record["identity"]["weights"]}
        load_state_(self.learner, tensors)
        self.step, self.seconds, self.history = record["step"], record["seconds"], record.get("history", [])
        self._write_history()

    def _write_history(self) -> None:
        """Writes `history.jsonl`. Line n always describes epoch n, even after interruptions and repeated epochs."""
        if self.accelerator.is_main_process:
            # The whole file is written atomically, because a crash could cut off an appended line.
            write_text(self.folder / "history.jsonl", "".join(json.dumps(each) + "\n" for each in self.history))

    def complete(self, interruption: threading.Event) -> TrainingRun:
        steps = self.learner.schedule.steps
        where = f"resuming at step {self.step} of {steps}" if self.step else f"{steps} steps"
        self.log(f"training {self.config.epochs} epochs of {self.steps_per_epoch} steps: {where}")
        while self.step < steps:
            began, before = time.perf_counter(), self.step
            self._run_epoch(interruption)
            self._end_epoch(self.step - before, time.perf_counter() - began)
        return self._finish()

    def _run_epoch(self, interruption: threading.Event) -> None:
        """Runs the remaining steps of the epoch."""
        # In a resumed run, the epoch continues at its next step.
        epoch, start = divmod(self.step, self.steps_per_epoch)
        self.learner.model.train()
        batches = self.splits.train.batches(
            self.config.batch_size,
            seed=derived_seed(self.config.seed, EPOCH, epoch),
            augmentation=self.config.augmentation or self.splits.augmentation,
            device=self.accelerator.device,
            shard=self.learner.shard,
            start=start,
        )
        if self.accelerator.is_main_process:
            batches = track(batches, f"training, epoch {epoch + 1}", self.steps_per_epoch - start)
        for batch in batches:
            self.learner.step_(batch, self.step)
            self.step += 1
            self._check(interruption)
        expected = (epoch + 1) * self.steps_per_epoch
        if self.step != expected:
            raise DataError(
                f"epoch {epoch + 1} ended after {self.step} steps instead of {expected}: images of the training split "
                "are missing. Restore them, or train in a new folder."
            )

    def _check(self, interruption: threading.Event) -> None:
        """Regularly checks for non-finite values and for a signal to stop, and writes a checkpoint when one is due."""
        learner, ended = self.learner, self.step % self.steps_per_epoch == 0
        due = self.step % self.config.checkpoint_every == 0
        if not (ended or due or self.step % self.check_every == 0):
            return
        # All processes get here at the same steps, because gathering and saving block until all processes call them.
        # All processes also get the same `signals`. Steps are negated, so the maximum over processes is the earliest
        # bad step.
        signals = torch.stack([-learner.first_bad, torch.full_like(learner.first_bad, interruption.is_set())])
        if learner.shard[1] > 1:
            signals = cast(Tensor, self.accelerator.gather(signals[None])).amax(0)
        bad, stop = signals.tolist()
        # Non-finite values are checked first, so that a checkpoint with NaN never replaces a good checkpoint.
        if -bad < self.step:
            checkpoints = self.checkpoints.all()
            good = f"the last good checkpoint is {checkpoints[-1]}" if checkpoints else "there is no checkpoint yet"
            rate = learner.schedule.rate(-bad)
            raise TrainingDiverged(
                f"the loss or the gradient was NaN or infinite at step {-bad}, with a learning rate of {rate:.3g}; "
                f"{good}. Train in a new folder with a lower learning rate, a longer warm-up or stronger clipping."
            )
        # At the end of an epoch, the epoch's record is written first. A signal to stop is then handled at the next
        # check, or at the end of the run.
        if ended or not (stop or due):
            return
        path = self._save()
        if stop:
            raise TrainingInterrupted(
                f"training stopped after step {self.step} of {learner.schedule.steps}; its state is in {path}. Run the "
                "same command again to resume."
            )

    def _end_epoch(self, steps: int, seconds: float) -> None:
        learner = self.learner
        # Validation uses the weights that would be saved, i.e. their running mean if there is one.
        with learner.mean.in_place() if learner.mean else nullcontext():
            validation_accuracy, validation_loss = evaluate(learner, self.validation)
        sums = dict(zip(learner.names, learner.summed(learner.sums).tolist(), strict=True))
        # The sums are cleared before the checkpoint below is written, because that checkpoint begins the next epoch.
        learner.sums.zero_()
        record = {
            "epoch": self.step // self.steps_per_epoch,
            "step": self.step,
            "learning_rate": learner.schedule.rate(self.step - 1),
            "loss": sums["loss"] / sums["steps"],
            "gradient_norm": sums["gradient_norm"] / sums["steps"],
            "losses": {loss.name: sums[loss.name] / sums["steps"] for loss in self.config.losses},
            "accuracy": sums["correct"] / sums["images"] if self.is_labelled else None,
            "validation_accuracy": validation_accuracy,
            "validation_loss": validation_loss,
            "seconds": seconds,
            "images_per_second": steps * self.config.batch_size / seconds,
        }
        self.history.append(record)
        self._write_history()
        shares = (("train", record["accuracy"]), ("validation", validation_accuracy))
        measured = "".join(f"{name} {share:.2%}  " for name, share in shares if share is not None)
        self.log(
            f"epoch {record['epoch']}/{self.config.epochs}  loss {record['loss']:.4f}  {measured}"
            f"{record['images_per_second']:.0f} images/s"
        )
        if self.step % self.config.checkpoint_every == 0 or self.step == learner.schedule.steps:
            self._save()

    def _save(self) -> Path:
        """Writes a checkpoint from the first process, while all other processes wait."""
        # All processes must call this function, because it adds up their sums and gathers their shards.
        tensors = state_tensors(self.learner, self.learner.summed(self.learner.sums))
        if self.accelerator.is_main_process:
            seconds = self.seconds + time.perf_counter() - self.began
            record = {"identity": self.requested, "seconds": seconds, "history": self.history}
            self.checkpoints.write(self.step, tensors, record)
        # All processes wait here. Otherwise one could end or resume before the files exist.
        self.accelerator.wait_for_everyone()
        return self.checkpoints.path(self.step)

    def _finish(self) -> TrainingRun:
        """Saves the model and training.json, which marks the run as finished."""
        learner = self.learner
        if learner.mean is not None:
            learner.mean.swap_()
        test, _ = evaluate(learner, self.test)
        # Without labels, all accuracies are None. `best` is then any record, and its accuracy is None, too.
        best = max(self.history, key=lambda record: record["validation_accuracy"] or 0.0)
        accuracy = {
            "test": test,
            "validation": self.history[-1]["validation_accuracy"],
            "best_validation": best["validation_accuracy"],
            "best_epoch": None if self.validation is None else best["epoch"],
        }
        seconds = self.seconds + time.perf_counter() - self.began
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "identity": self.requested,
            "history": self.history,
            "accuracy": accuracy,
            "steps": self.step,
            "seconds": seconds,
            "images_per_second": self.step * self.config.batch_size / seconds,
            "notes": list(self.splits.notes),
            "versions": {"python": platform.python_version(), **installed_versions("attnrx", "torch", "accelerate")},
            "device": device_name(str(self.accelerator.device)),
            "processes": self.accelerator.num_processes,
            "threads": torch.get_num_threads(),
        }
        model = learner.target
        if model is not learner.model:
            # The caller's model is not sharded. Every process loads the gathered weights into its own copy of it.
            load_tensors_(model, gather_tensors(learner.model.state_dict(), keep=True))
        if self.accelerator.is_main_process:
            notes = {"trained_on": self.splits.name, "accuracy": accuracy}
            save_model(self.folder, model, notes, lambda new: write_json(new / "training.json", record))
        self.accelerator.wait_for_everyone()
        return TrainingRun(model.eval(), tuple(self.history), self.folder, record)
