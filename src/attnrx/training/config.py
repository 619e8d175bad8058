"""All settings of a training run."""

from dataclasses import dataclass
from typing import Literal

from attnrx.data import Augmentation
from attnrx.support.arguments import COUNT, NOT_NEGATIVE, POSITIVE, RATE, SEED, optional, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.training.losses import Loss, Task


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of a training run. The defaults train a small model on images of 32x32 pixels from scratch.

    The learning rate is updated in every step. It rises linearly during the warm-up, and then falls along a cosine.
    Weight decay is applied to matrices, but not to biases and norms. Learned strengths have their own decay.

    In SVDA attention, each direction (rank-one term) of the scores has a learned strength. Queries and keys have unit
    length there, so the strengths limit how large a score can be. A large `strength_init` allows sharp attention, but
    keeps the strengths similar. `strength_decay` moves heads towards uniform attention. A larger
    `strength_learning_rate` makes the strengths differ more.

    With `parallel="ddp"`, every process has a copy of the model. With `parallel="fsdp"`, every process has a shard of
    the weights, gradients, optimizer state and running mean, and gathers the weights for every step. With `accumulate`,
    a process divides its images of a step into parts, as if there were more processes. All of these settings give the
    same result, up to rounding. So you may resume a run with other values of `parallel` and `accumulate`, or with
    another number of processes.

    Attributes:
        epochs: Passes over the training images.
        batch_size: Images per step, over all processes (256, or fewer for small datasets on the command line).
        accumulate: The number of parts into which a process divides its share of a batch. The parts are processed one
            after the other, which saves memory.
        learning_rate: Peak learning rate, at the end of the warm-up.
        min_learning_rate: Final learning rate, at the end of the cosine decay.
        warmup_learning_rate: Initial learning rate, at the start of the warm-up.
        weight_decay: Weight decay of matrices. Biases, norms and strengths are excluded.
        warmup_epochs: Epochs in which the learning rate rises (5, but at most a tenth of the run).
        gradient_clip: Maximum norm of the gradient. Larger gradients are scaled down to it. None turns clipping off.
        losses: The terms of the objective. Every term has its own weight.
        augmentation: Augmentation of the training images. None means the dataset's own augmentation.
            `Augmentation(padding=0, flip=False)` disables augmentation.
        predictor_learning_rate: Factor that multiplies the learning rate for token predictors.
        strength_init: Initial value of every strength. Larger values sharpen attention sooner. None keeps the model's
            own values.
        strength_decay: Weight decay of the strengths, which pulls weak strengths to zero.
        strength_learning_rate: Factor that multiplies the learning rate for strengths. A larger factor spreads the
            strengths sooner.
        precision: Precision of matrix products in the forward pass. The dtype of the weights does not change.
        compile: Compile the model with torch.compile for training.
        parallel: How several processes (accelerate launch, torchrun) store the model. With ddp, each process has a
            copy. With fsdp, each process has a shard.
        ema: Decay of an exponential moving average of the weights, which is validated and saved instead of the last
            weights (off).
        seed: Seed for new weights, the order of images, augmentation and noise.
        checkpoint_every: Steps between checkpoints. A checkpoint is also written when the run is interrupted.
    """

    example = "attnrx.TrainingConfig(epochs=10)"

    epochs: int = 80
    batch_size: int = 256
    accumulate: int = 1
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.0
    warmup_learning_rate: float = 0.0
    weight_decay: float = 0.05
    warmup_epochs: float | None = None
    gradient_clip: float | None = 1.0
    losses: tuple[Loss, ...] = (Task(label_smoothing=0.1),)
    augmentation: Augmentation | None = None
    predictor_learning_rate: float = 10.0
    strength_init: float | None = None
    strength_decay: float = 0.0
    strength_learning_rate: float = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    ema: float | None = None
    seed: int = 42
    checkpoint_every: int = 500

    def __post_init__(self):
        by_type = {int: COUNT, float: NOT_NEGATIVE, float | None: optional(POSITIVE)}
        optionals = {"warmup_epochs": optional(NOT_NEGATIVE), "ema": optional(RATE)}
        require_fields(self, by_type, learning_rate=POSITIVE, seed=SEED, **optionals)
        for name in ("min_learning_rate", "warmup_learning_rate"):
            self._require(name, 0 <= getattr(self, name) <= self.learning_rate, "lies between 0 and learning_rate")
        warmup = self.warmup_epochs
        self._require("warmup_epochs", warmup is None or 0 <= warmup < self.epochs, "must be less than epochs, or None")
        names = [loss.name for loss in self.losses]
        self._require(
            "losses", names and len(names) == len(set(names)), "must hold one loss or more, of different kinds"
        )

    @property
    def warmup(self) -> float:
        """The number of warm-up epochs: `warmup_epochs` if it is set, otherwise 5, but at most a tenth of the run."""
        return min(5.0, self.epochs / 10) if self.warmup_epochs is None else self.warmup_epochs

    @property
    def reads_labels(self) -> bool:
        return any(loss.reads_labels for loss in self.losses)

    def _require(self, name: str, holds: object, what: str) -> None:
        if not holds:
            raise InvalidInput(f"TrainingConfig({name}={getattr(self, name)!r}): {name} {what}.")
