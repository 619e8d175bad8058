"""One training step, with the optimizer, the learning rate schedule and a running mean of the weights.

The weights may be sharded over the processes (FSDP2). Between steps, every process then stores a shard of all weights,
gradients, optimizer states and running means. In a step, the weights are gathered block by block, and stay gathered
until all gradients are computed. So a loss can use the weights as ordinary tensors and run the model more than once.
This module calls PyTorch's `fully_shard` directly, because Accelerate supports FSDP only on accelerators, and
`fully_shard` also runs on CPUs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from attnrx.data import Batch
from attnrx.support.errors import NotSupported
from attnrx.support.hardware import bfloat16_products
from attnrx.support.shapes import Float, ImageBatch, Int, Tensor
from attnrx.training.config import TrainingConfig
from attnrx.training.losses import LossContext, TeacherSource
from attnrx.vit.models import Answering, family_of, recording_tokens
from attnrx.vit.models.parts.record import TOKENS, record_of

if TYPE_CHECKING:
    from accelerate import Accelerator

NEVER = 2**62  # a step that no run reaches
STRENGTHS = ("strength_init", "strength_decay", "strength_learning_rate")  # the settings of learned strengths
PREDICTORS = ("tokens.", f"{TOKENS}.")  # parameter prefixes of the predictors of a token policy

EPOCH, STEP, NOISE = 0, 1, 2  # the purpose is a part of the seed, so that no two purposes share random numbers


def derived_seed(*parts: int) -> int:
    """Returns a seed that depends on all `parts`. Similar parts, e.g. consecutive steps, lead to unrelated seeds.

    All random numbers of a step depend only on the run's seed, the step number and the part of the batch. A run can
    therefore be resumed without saved generator states.
    """
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


@dataclass(frozen=True)
class Schedule:
    """The learning rate schedule of a run: a linear warm-up, followed by a cosine decay."""

    config: TrainingConfig
    steps_per_epoch: int

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.config.epochs

    def rate(self, step: int) -> float:
        warmup, full = round(self.config.warmup * self.steps_per_epoch), self.config.learning_rate
        if step < warmup:
            lowest, share = self.config.warmup_learning_rate, (step + 1) / (warmup + 1)  # above 0 for the first step
        else:
            lowest = self.config.min_learning_rate
            share = 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))
        return lowest + (full - lowest) * share


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """Returns AdamW with separate parameter groups for matrices, for biases and norms, and for learned strengths.

    Biases and norms have no weight decay. Token predictors, which learn which tokens to prune, have their own groups.
    The learning rate of a group is multiplied by the group's `factor`.
    """
    strengths = {id(strength) for strength in strengths_of(model)}  # by identity, as tensors compare elementwise
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "strengths" if id(parameter) in strengths else "matrices" if parameter.ndim > 1 else "vectors"
            kind = f"predictor {kind}" if name.startswith(PREDICTORS) else kind
            groups.setdefault(kind, []).append(parameter)
    decay = {"matrices": config.weight_decay, "predictor matrices": config.weight_decay}
    decay["strengths"] = config.strength_decay
    factor = {"strengths": config.strength_learning_rate}
    factor |= dict.fromkeys(("predictor matrices", "predictor vectors"), config.predictor_learning_rate)
    parameter_groups = [
        {"params": parameters, "weight_decay": decay.get(kind, 0.0), "factor": factor.get(kind, 1.0)}
        for kind, parameters in groups.items()
    ]
    return torch.optim.AdamW(parameter_groups, lr=config.learning_rate, fused=True)  # a few kernels for all parameters


def strengths_of(model: nn.Module) -> list[nn.Parameter]:
    """Returns the learned strengths (SVDA's sigma) of all layers that normalize query and key rows to unit length."""
    strengths = [layer.scores.strengths() for layer in family_of(model).attention(model) if layer.spec.has_norms]
    return [strength for strength in strengths if isinstance(strength, nn.Parameter)]


def shard_(model: nn.Module, accelerator: "Accelerator") -> nn.Module:
    """Shards the weights of every block, and then all other weights, over all processes."""
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    # Blocks come first, because `fully_shard` shards the parameters that no inner call has sharded.
    for name in family_of(model).block_names(model):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for part in _parts(model):
        part.set_reshard_after_backward(False)
    return model


def reshard_(model: nn.Module) -> None:
    """Frees the gathered weights, so that every process holds only its shard. Unsharded models are left unchanged."""
    for part in _parts(model):
        part.reshard()


@contextmanager
def gathered_weights(model: nn.Module) -> Iterator[None]:
    """Gathers the weights of a sharded model within the context, so that each process can run the model independently.

    All processes must enter and exit the context together, and the weights must not change within it. For a model that
    is not sharded, the context has no effect.
    """
    for part in _parts(model):
        part.unshard()
    try:
        yield
    finally:
        reshard_(model)


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this process's shard of a tensor (any shape) as a view, or the tensor itself if it is not sharded."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns a whole tensor (any shape), gathered from its shards. All processes must call this function."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Gathers sharded tensors one by one, and moves the whole tensors to the CPU.

    If `keep` is false, this process contributes its shards, but gets an empty dict.
    """
    whole_tensors = {}
    for name, tensor in tensors.items():
        # Tensors are gathered one by one and moved to the CPU, because all of them may not fit on a device beside the
        # shards. Every process takes part, even if it keeps nothing.
        gathered = full_tensor(tensor.detach())
        if keep:
            whole_tensors[name] = gathered.cpu() if isinstance(tensor, DTensor) else gathered
    return whole_tensors


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Moves a tensor of any shape to the device of `like`, and shards it like `like` if both have the same shape.

    Every process must pass the whole tensor.
    """
    tensor = tensor.to(like.device)
    # Tensors of another shape are not sharded, e.g. the optimizer's number of steps.
    if not isinstance(like, DTensor) or tensor.shape != like.shape:
        return tensor
    # With src_data_rank=None, every process cuts its shard from its own whole tensor, and nothing is sent.
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def copy_whole_(target: Tensor, tensor: Tensor) -> None:
    """Copies an unsharded tensor, which every process has, into a tensor of the same shape that may be sharded."""
    local_shard(target).copy_(local_shard(shard_like(tensor, target)))


def _parts(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class WeightMean:
    """The exponential moving average of a model's parameters, sharded like the parameters. Buffers are not averaged."""

    def __init__(self, model: nn.Module, decay: float):
        self._decay = decay
        self._live = dict(model.named_parameters())
        self.tensors = {name: parameter.detach().clone() for name, parameter in self._live.items()}

    @torch.no_grad()
    def update_(self, step: int) -> None:
        """Updates the mean after the training step with the index `step`.

        The decay is smaller in early steps, so the mean soon forgets the initial weights.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        means, live = ([local_shard(part) for part in parts.values()] for parts in (self.tensors, self._live))
        # One call updates all parameters, because a kernel for each would take longer than the arithmetic. Each process
        # updates its own shards.
        torch._foreach_lerp_(means, live, 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replaces the model's weights by their mean within the context."""
        self.swap_()
        try:
            yield
        finally:
            self.swap_()

    @torch.no_grad()
    def swap_(self) -> None:
        """Exchanges the mean and the weights of the model."""
        for name, parameter in self._live.items():
            live, mean = local_shard(parameter), local_shard(self.tensors[name])
            # The tensors are changed in place, because the optimizer and the wrapped model refer to them.
            saved = live.clone()
            live.copy_(mean)
            mean.copy_(saved)


class Learner:
    """A model in training, with its optimizer and state.

    `wrapped` is the model that the steps call, with its wrappers for compilation and distributed training.
    """

    def __init__(
        self,
        target: nn.Module,
        model: nn.Module,
        num_images: int,
        config: TrainingConfig,
        accelerator: "Accelerator",
        features: list[Tensor] | None = None,
        teachers: Mapping[TeacherSource, nn.Module] | None = None,
    ):
        """Moves the model to the training device, and creates the optimizer, the running mean and the wrappers.

        `target` is the model that the user passed. `model` is the model to train, which is `target` itself or, if the
        weights are sharded, a copy of it. If a loss needs the outputs of blocks, every forward pass appends them to
        `features`, each with the shape [batch, tokens, width]. `teachers` contains the loaded teacher models.

        Raises:
            NotSupported: The config has settings for learned strengths, but the model has no learned strengths.
        """
        strengths, device = strengths_of(model), accelerator.device
        # A setting without effect is an error, because the user expects an effect.
        given = [name for name in STRENGTHS if getattr(config, name) != getattr(TrainingConfig, name)]
        if given and not strengths:
            raise NotSupported(f"{', '.join(given)}: given, but this model has no learned strengths; omit it.")
        if config.strength_init is not None:
            for strength in strengths:
                nn.init.constant_(strength, config.strength_init)
        model.to(device)  # the model must be moved before it is wrapped and before the optimizer is created
        self.target, self.model, self.config, self.accelerator = target, model, config, accelerator
        self.features, self.teachers = features, teachers or {}
        self.wrapped: Callable[[Tensor], Tensor]
        called = model if model is target else shard_(model, accelerator)
        called = called if record_of(model) is None else Answering(called)
        self.wrapped = accelerator.prepare_model(called) if model is target else called
        if config.compile:  # compiled as a separate object, so that the model keeps its parameter names
            self.wrapped = torch.compile(self.wrapped)
        self.optimizer = build_optimizer(model, config)
        self.mean = None if config.ema is None else WeightMean(model, config.ema)
        self.names = (*(loss.name for loss in config.losses), "loss", "gradient_norm", "correct", "images", "steps")
        # The sums over the steps of the present epoch, in the order of `names`. Checkpoints include these sums.
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.schedule = Schedule(config, num_images // config.batch_size)
        # The first step with a non-finite loss or gradient. The number is a tensor on the device, so that a step can
        # write to it without waiting for the GPU.
        self.first_bad = torch.tensor(NEVER, device=device)

    @property
    def shard(self) -> tuple[int, int]:
        return self.accelerator.process_index, self.accelerator.num_processes

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def autocast(self) -> AbstractContextManager:
        """Returns the context of the forward pass, in which matrix products use bfloat16 if `precision` is "bf16"."""
        return bfloat16_products(self.accelerator.device, self.config.precision == "bf16")

    def summed(self, sums: Float[Tensor, "names"]) -> Float[Tensor, "names"]:
        total: Any = self.accelerator.reduce(sums, "sum")  # Any, because it is annotated as possibly None
        return total

    def step_(self, batch: Batch, step: int) -> None:
        """Runs one training step on this process's share of the batch, which is divided into `accumulate` parts."""
        config, parts, (process, processes) = self.config, self.config.accumulate, self.shard
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate(step) * group["factor"]
        found = []
        for part in range(parts):
            share = slice(len(batch) * part // parts, len(batch) * (part + 1) // parts)
            images, labels = batch.images[share].to(self.dtype), batch.labels[share]
            # A part contains the images that one process would get if there were `processes * parts` processes.
            with nullcontext() if part == parts - 1 else self.unsynchronized():
                found.append(self._backward(images, labels, step, (process * parts + part, processes * parts)))
        *means, num_correct = found[0] if parts == 1 else torch.stack(found).sum(0)
        reshard_(self.model)  # the optimizer works on the shards
        clip = config.gradient_clip  # an infinite limit clips nothing, but the norm is still recorded
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if clip is None else clip)
        self.optimizer.step()
        # Setting gradients to None frees their memory, and saves the next backward pass an addition to zeros.
        self.optimizer.zero_grad(set_to_none=True)
        if self.mean is not None:
            self.mean.update_(step)
        # Each of N processes adds 1/N of a step, so that a run can be resumed with another number of processes.
        share_of_step, norm = 1 / processes, full_tensor(norm)
        # torch.full_like does not synchronize with the GPU, but copying a number to it would.
        counts = [torch.full_like(self.sums[0], number) for number in (len(batch), share_of_step)]
        values = [*(value * share_of_step for value in (*means, norm)), num_correct, *counts]
        self.sums += torch.stack([value.to(self.sums) for value in values])
        # A Python condition would wait for the GPU here. Instead, `_Run._check` reads `first_bad` now and then.
        finite = torch.isfinite(means[-1]) & torch.isfinite(norm)
        self.first_bad.copy_(torch.where(finite, self.first_bad, self.first_bad.clamp(max=step)))

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """Turns off gradient synchronization within the context, so every process accumulates its own gradients."""
        sharded = _parts(self.model)
        for each in sharded:
            each.set_requires_gradient_sync(False, recurse=False)
        try:
            with self.accelerator.no_sync(cast(nn.Module, self.wrapped)):  # for ddp, with a replica per process
                yield
        finally:
            for each in sharded:
                each.set_requires_gradient_sync(True, recurse=False)

    def _backward(
        self, images: ImageBatch, labels: Int[Tensor, "batch"], step: int, shard: tuple[int, int]
    ) -> Float[Tensor, "numbers"]:
        """Runs the forward and backward pass of one part of a step.

        `shard` contains the index of this part and the number of parts over all processes. Returns the loss terms and
        the total loss, all divided by `accumulate`, and the number of correct predictions.
        """
        config = self.config
        # Dropout and sampled tokens use this seed. Every process has different images, so its seed differs, too.
        torch.manual_seed(derived_seed(config.seed, STEP, step, shard[0]))
        if self.features is not None:
            self.features.clear()  # the blocks append to it in every forward pass
        with self.autocast():
            with recording_tokens(self.model) as runs:
                logits = self.wrapped(images)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bfloat16 is too coarse for a softmax
            context = LossContext(
                self.model,
                images,
                labels,
                logits,
                seed=derived_seed(config.seed, NOISE, step),
                shard=shard,
                features=tuple(self.features or ()),
                run=runs[-1] if runs else None,
                progress=step / self.schedule.steps,
                teachers=self.teachers,
            )
            terms = [loss(context) for loss in config.losses]
        # Weights are divided by the number of parts, so that the parts add up to the mean over the process's images.
        weights = [loss.weight / config.accumulate for loss in config.losses]
        total = torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()
        self.accelerator.backward(total)
        num_correct = (logits.detach().argmax(-1) == labels).sum()
        means = [term.detach() / config.accumulate for term in terms] if config.accumulate > 1 else terms
        return torch.stack([*(value.detach().to(self.sums) for value in (*means, total, num_correct))])
