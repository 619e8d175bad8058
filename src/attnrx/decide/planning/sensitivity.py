"""Measures how far outputs deviate from the original's, and how each single choice changes them (its sensitivity).

To measure a sensitivity, the model runs only from the changed layer on.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from attnrx.change.predictions import Predictions, outputs_of, stored
from attnrx.change.realization import realize
from attnrx.data import ImageSet, require_labelled, require_labels
from attnrx.data.images import UNLABELLED
from attnrx.decide.planning.space import RANKS, TOKENS, Choices, PlanSettings, Space
from attnrx.support.errors import AttnrxError, DataError
from attnrx.support.hardware import bfloat16_products, has_fast_bfloat16
from attnrx.support.modules import evaluating
from attnrx.support.progress import Log, track
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.vit.models import (
    Family,
    ModuleCall,
    attach_tokens_,
    blocks_of,
    family_of,
    recording_calls,
    replacing_forward,
)
from attnrx.vit.outputs import Embeddings, OutputKind, output_kind_of
from attnrx.vit.tokens import TokenPolicy

# Before plans are compared in bfloat16, the effect of rounding is measured on ROUNDED images. The divergence by
# rounding may be at most MOST_ROUNDING times a divergence at which a decision may change (`flip_divergence`).
ROUNDED, MOST_ROUNDING = 4, 0.01


@dataclass(frozen=True)
class Deviation:
    """How far a candidate's outputs deviate from the original's, per image.

    For class predictions, `divergence` is KL(original || candidate) in nats. `softened` is the limit of this divergence
    for a high softmax temperature. `agrees` is 1 if both models predict the same class, else 0. `change` is +1 if only
    the candidate is correct, -1 if only the original is, else 0. Without labels, `change` is None. `attnrx.vit.outputs`
    defines these numbers for other outputs. A regression makes no decisions, so `agrees` and `change` are None.
    """

    divergence: Float[Tensor, "images"]
    softened: Float[Tensor, "images"]
    agrees: Float[Tensor, "images"] | None
    change: Float[Tensor, "images"] | None

    @property
    def mean(self) -> float:
        """The divergence, averaged over the images."""
        return float(self.divergence.mean())


@dataclass(frozen=True, eq=False)
class Answers:
    """Holds batches of images in memory, with the original's outputs for them, to compare candidates.

    With `bfloat16`, all matrix products are computed in bfloat16.
    """

    batches: tuple[Tensor, ...]
    labels: Int[Tensor, "images *labels"] | None
    outputs: Float[Tensor, "images classes"]
    kind: OutputKind
    bfloat16: bool = False

    @classmethod
    def of(cls, model: nn.Module, images: ImageSet, batch_size: int, bfloat16: bool = False) -> "Answers":
        """Runs the original on all images and stores its outputs. The images need no labels.

        Raises:
            DataError: There are no images, a label does not match the outputs, or an embedding is zero.
        """
        weight, kind = next(model.parameters()), output_kind_of(model)
        has_labels = images.has_labels and kind.has_decisions
        if has_labels:
            require_labels(images)
        # Every candidate is measured on the same batches. So the batches stay in memory, on the model's device and in
        # its precision.
        pixels, labels, outputs = [], [], []
        with evaluating([model]), bfloat16_products(weight.device, bfloat16):
            batches = images.batches(batch_size, device=weight.device)
            for batch in track(batches, "outputs of the original", -(-len(images) // batch_size)):
                pixels.append(batch.images.to(weight.dtype))
                labels.append(batch.labels.cpu())
                outputs.append(stored(outputs_of(model, pixels[-1])))
        if not pixels:
            raise DataError("a plan was given no image to measure on; give some, e.g. 128 training images.")
        numbers = torch.cat(labels) if has_labels else None
        if numbers is not None:
            require_labelled(numbers)
        answers = torch.cat(outputs)
        # Embeddings are compared by direction. A zero embedding has no direction, so a plan for it would be arbitrary.
        if isinstance(kind, Embeddings) and not bool((answers.abs().amax(-1) > 0).all()):
            raise DataError(
                "the model returns an embedding of zeros for an image of the plan, whose direction is undefined: give "
                "images of its task, or check the weights of its projection."
            )
        return cls(tuple(pixels), numbers, answers, kind, bfloat16)

    def __len__(self) -> int:
        return len(self.outputs)

    def first(self, count: int) -> "Answers":
        """Returns the first batches that together hold at least `count` images, with the original's outputs."""
        # Batches stay whole, so that no outputs have to be computed again.
        return self._of(self.batches[: -(-count // len(self.batches[0]))])

    def exactly(self, count: int) -> "Answers":
        """Returns exactly the first `count` images, with the original's outputs. The last batch is shortened."""
        some = self.first(count)
        *whole, last = some.batches
        return self._of((*whole, last[: len(last) - max(len(some) - count, 0)]))

    def _of(self, batches: tuple[Tensor, ...]) -> "Answers":
        images = sum(map(len, batches))
        labels = None if self.labels is None else self.labels[:images]
        return replace(self, batches=batches, labels=labels, outputs=self.outputs[:images])

    def measure(self, candidate: nn.Module) -> Deviation:
        """Runs a candidate on the images and returns its deviation."""
        return self.deviation(self.outputs_of(candidate))

    def outputs_of(self, candidate: nn.Module, start: int = 0) -> list[Tensor]:
        """Runs a candidate on all batches from index `start` on, and returns its outputs per batch."""
        with evaluating([candidate]), bfloat16_products(self.batches[0].device, self.bfloat16):
            return [stored(outputs_of(candidate, batch)) for batch in self.batches[start:]]

    def deviation(self, answered: Sequence[Tensor]) -> Deviation:
        """Returns the deviation of a candidate's outputs.

        `answered` holds one tensor per batch, with the same shape as the original's outputs.
        """
        base, other, kind = self.outputs, torch.cat(list(answered)), self.kind
        labels = torch.full((len(base),), UNLABELLED) if self.labels is None else self.labels
        both, agrees, change = Predictions({"original": base, "candidate": other}, labels, kind), None, None
        if kind.has_decisions:
            agrees = both.agreement("original", "candidate")
            change = None if self.labels is None else both.change("original", "candidate")
        return Deviation(both.divergence("original", "candidate"), kind.softened(base, other), agrees, change)


def suits_bfloat16(model: nn.Module, images: ImageSet, log: Log) -> bool:
    """Whether plans can be compared in bfloat16.

    There are two conditions. The model's device must compute bfloat16 products faster than float32. Rounding must
    change the outputs by far less than a plan does.
    """
    weight = next(model.parameters())
    if weight.dtype != torch.float32 or not has_fast_bfloat16(weight.device.type):
        return False
    exact = Answers.of(model, images.take(min(ROUNDED, len(images))), ROUNDED)
    try:
        rounding = replace(exact, bfloat16=True).measure(model).mean
    except AttnrxError:  # a part of the model does not accept such products, or overflows
        return False
    suits = rounding <= MOST_ROUNDING * exact.kind.flip_divergence
    log(f"plans are compared in {'bfloat16' if suits else 'float32'}: rounding to bfloat16 is {rounding:.2g} away")
    return suits


BlockCalls = Sequence[Sequence[ModuleCall]]  # the calls of every block, several if a module calls the model repeatedly


@contextmanager
def resumed(
    model: nn.Module, family: Family, given: Sequence[Any], layer: int, earlier: BlockCalls = ()
) -> Iterator[None]:
    """Lets one forward pass skip the first `layer` blocks and continue from their recorded outputs.

    The last skipped block returns one entry of `given` per call, in the format of a block's output. The other skipped
    blocks return the outputs of their `earlier` calls, because a decoder may read them. If `layer` is 0, the whole
    model runs. Hooks on the blocks still run.

    If attnrx cannot read the model's attention, it treats only the MLPs as blocks, and other modules lie between them.
    In this case, only block number `layer` (counted from 1) is skipped.
    """
    # The model itself calls its blocks, so its code around and between them still runs, e.g. rotary tables and pooling.
    # Skipped blocks return at once.
    with ExitStack() as stack:
        for index, block in enumerate(blocks_of(model, family)[:layer]):
            if not family.reads_attention(model) and index < layer - 1:
                continue
            outputs = iter(given if index == layer - 1 else [call.output for call in earlier[index]])
            stack.enter_context(replacing_forward(block, lambda *_, outputs=outputs, **__: next(outputs)))
        yield


# The smallest divergence, in nats. The logarithms of smaller values would be infinite, or follow rounding errors.
LEAST = 1e-9


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """The sensitivity of every single choice, which is the mean softened divergence that it causes (`Deviation`).

    `ranks` maps each rank axis (qk, vo or MLP) to a table [layer, level]. For tokens, the divergence is measured at a
    few numbers of pruned patches. `log_counts` [point] holds the logarithms of these numbers. `tokens` [layer, point]
    holds the logarithms of the divergences. Between and beyond the points, the divergence is assumed to be a power
    function of the number of pruned patches.

    After earlier stages, the remaining patches are less redundant. The sensitivity of a stage is therefore a
    difference. It is the divergence at the total number of pruned patches after the stage, minus the divergence at the
    total before it.
    """

    ranks: Mapping[str, np.ndarray]
    log_counts: np.ndarray
    tokens: np.ndarray
    # This cache saves time, because the dynamic program and the greedy moves need the same totals many times.
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    def of_pruned(self, layer: int, count: int) -> float:
        """Returns the sensitivity of pruning `count` patches before this layer and none before other layers."""
        if not count:
            return 0.0
        key = (layer, count)
        if key not in self._known:
            self._known[key] = math.exp(_on_line(math.log(count), self.log_counts, self.tokens[layer]))
        return self._known[key]

    def total(self, choices: Choices) -> float:
        """Returns the summed sensitivities of all choices in a plan."""
        sensitivity = 0.0
        for layer, (count, gone) in enumerate(zip(choices.num_pruned, choices.left, strict=True)):
            for axis in RANKS:
                sensitivity += float(self.ranks[axis][layer, choices.of(axis)[layer]])
            if count:
                sensitivity += self.of_pruned(layer, gone) - self.of_pruned(layer, gone - count)
        return sensitivity


def measure_sensitivities(space: Space, answers: Answers, settings: PlanSettings) -> Sensitivities:
    """Measures the sensitivity of every axis at the probed levels, by changing one layer at a time.

    The layers before the changed one run only once per batch. Between the probed levels, the sensitivity is
    interpolated as a function of the removed energy. This energy is the sum of the squared strengths of the pruned
    directions, in the metric that prescriptions record.

    With `layer_stride`, some layers are not measured. For these layers, the divergence per removed energy, and the
    divergence for each number of pruned patches, are interpolated between the measured layers.
    """
    probes = {
        (axis, level): realize(space.model, space.prescription(space.uniform(axis, level)))
        for axis in RANKS
        for level in space.measured(axis, settings.probed_levels)
        if space.piece(axis, level) is not None
    }
    # The inputs of all blocks are recorded once per batch. A model with one changed block runs only from that block on,
    # which is half of its layers on average.
    # Without the token axis, `counts` is empty. No plan prunes patches then, so `of_pruned` never reads the tables.
    shares = settings.pruned_shares if TOKENS in space.axes else ()
    counts = sorted(
        {min(max(space.step, round(share * space.patches)), space.patches - 1) for share in shares}  # one patch stays
    )
    measured = {key: np.zeros(space.depth) for key in probes}
    num_pruned = np.zeros((space.depth, len(counts)))
    layers = sorted({*range(0, space.depth, settings.layer_stride), space.depth - 1})
    # Every probe is a model with one level of one axis in all layers. Only one of its blocks is used at a time.
    probe_batch = _BatchProbe(space, family_of(space.model), layers, answers.kind)
    # Probes run in the model's own precision, because rounding to bfloat16 changes outputs as much as many choices do.
    with evaluating([space.model, *probes.values()]):
        works = (None, *probes, *range(len(counts)))  # None: a new batch
        parts = [(part, work) for part in answers.batches for work in works]
        for part, work in track(parts, "sensitivities"):
            if work is None:
                probe_batch.take(part)
            elif isinstance(work, int):
                num_pruned[:, work] += probe_batch.with_num_pruned(counts[work])
            else:
                measured[work] += probe_batch.with_block_of(probes[work])
    ranks = {axis: _curves(space, axis, measured, len(answers), layers) for axis in RANKS}
    logs = over_layers(np.log(np.maximum(num_pruned / len(answers), LEAST)), layers)
    return Sensitivities(ranks, np.log(np.array(counts or [1], dtype=float)), logs)


def over_layers(logs: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """Interpolates logarithms [layer, _] linearly between the measured layers."""
    interpolated = np.empty_like(logs)
    for index, column in enumerate(logs.T):
        interpolated[:, index] = np.interp(range(len(logs)), layers, column[list(layers)])
    return interpolated


class _BatchProbe:
    """Records the calls of every block on one batch, and evaluates changed blocks on these recorded calls."""

    def __init__(self, space: Space, family: Family, layers: Sequence[int], outputs: OutputKind):
        self.space, self.family, self.layers, self.outputs = space, family, layers, outputs

    def take(self, images: Float[Tensor, "batch channels height width"]) -> None:
        self.images, blocks = images, blocks_of(self.space.model, self.family)
        with recording_calls(blocks, lambda call: call) as calls:
            self.base = stored(outputs_of(self.space.model, images))
        self.calls: BlockCalls = [[call for call in calls if call.module is block] for block in blocks]

    def with_block_of(self, other: nn.Module) -> np.ndarray:
        """Replaces single blocks with the blocks of `other`. Returns the divergence [layer], summed over images."""
        sums = np.zeros(len(self.calls))
        blocks = blocks_of(other, self.family)
        for layer in self.layers:
            outputs = [blocks[layer](call.tokens, *call.args, **call.kwargs) for call in self.calls[layer]]
            sums[layer] = self._from(self.space.model, outputs, layer + 1)
        return sums

    def with_num_pruned(self, count: int) -> np.ndarray:
        """Prunes `count` patches before one layer at a time. Returns the divergence [layer], summed over images."""
        sums, reducer = np.zeros(len(self.calls)), self.space.reducer
        assert reducer is not None
        # No stage can precede the first layer, so a stage before the second layer is measured in its place.
        for layer in {max(layer, 1) for layer in self.layers}:
            # The copy shares the weights.
            changed = copy.deepcopy(self.space.model, {id(weight): weight for weight in self.space.model.parameters()})
            keep = (self.space.patches - count) / self.space.patches
            attach_tokens_(changed, self.family, TokenPolicy(reducer, (layer + 1,), (keep,)))
            # If a reducer needs captured attention, the previous layer must run, too. Some reducers need all layers.
            start = 0 if reducer.every_layer else layer - 1 if reducer.needs else layer
            sums[layer] = self._from(changed, [call.tokens_as_output for call in self.calls[start]], start)
        # Row 0 is only an end point for interpolation over the layers, because no plan has a stage there.
        sums[0] = sums[min(max(self.layers[0], 1), len(sums) - 1)]
        return sums

    def _from(self, model: nn.Module, given: Sequence[Any], layer: int) -> float:
        with resumed(model, self.family, given, layer, self.calls):
            other = stored(outputs_of(model, self.images))
        # The last batch may be smaller, so this returns a sum. The caller divides it by the number of images.
        return float(self.outputs.softened(self.base, other).sum())


def _curves(
    space: Space, axis: str, measured: Mapping[tuple[str, int], np.ndarray], images: int, layers: Sequence[int]
) -> np.ndarray:
    """Returns the sensitivities [layer, level] of an axis, interpolated between the measured levels.

    The logarithm of the divergence is interpolated over the logarithm of the removed energy.
    """
    sensitivities = np.zeros((space.depth, len(space.levels)))
    levels = [level for measured_axis, level in measured if measured_axis == axis]
    if not levels:
        return sensitivities
    # To second order, the divergence is proportional to a map's squared error, which is the removed energy. In
    # logarithms, this is a line of slope one with one offset per layer. So the interpolations only correct small
    # deviations from these lines.
    energies = {
        level: np.log(np.maximum(removed_energies(space, axis, level), 1e-30)) for level in space.available(axis)
    }
    # [layer, measured level], like `logs`.
    log_errors = np.stack([energies[level] for level in levels], axis=1)
    logs = np.log(np.maximum(np.stack([measured[axis, level] for level in levels], axis=1) / images, LEAST))
    # Only the offset is interpolated over the layers, because the divergence itself depends on each layer's energies.
    logs = log_errors + over_layers(logs - log_errors, layers)
    for layer in range(space.depth):
        for level, per_layer in energies.items():
            sensitivities[layer, level] = math.exp(_on_line(float(per_layer[layer]), log_errors[layer], logs[layer]))
    # With few images, a lower level may look better than a higher one by chance. The search would always choose it.
    return np.maximum.accumulate(sensitivities, axis=1)


def removed_energies(space: Space, axis: str, level: int) -> list[float]:
    """Returns, for every layer, the sum of the squared strengths of what a level of an axis removes."""
    piece = space.piece(axis, level)
    assert piece is not None
    if axis == "qk":  # the prescription may lack the original strengths of pruned directions
        pairs = zip(space.spectra, piece.layers, strict=True)
        return [float((each.strength.square() * each.used * ~layer.qk.keep).sum()) for each, layer in pairs]
    removed = [0.0] * space.depth
    for index, layer in enumerate(piece.layers):
        if layer.hidden is not None:
            removed[index] += float(layer.hidden.strength.square()[~layer.hidden.keep].sum())
        for output in layer.outputs.values():
            # Every unit keeps its largest strengths, up to its rank. The stored order may be another one.
            energies = output.strength.square().sort(dim=-1, descending=True).values
            removed[index] += sum(float(each[rank:].sum()) for each, rank in zip(energies, output.ranks, strict=True))
    return removed


def _on_line(x: float, points: np.ndarray, values: np.ndarray) -> float:
    """Interpolates linearly between points and extrapolates beyond them, with slopes of at least 0.

    With a single point, the slope is 1.
    """
    # A negative slope is noise. Extrapolating it would make large changes look harmless. Slope 1, in logarithms, means
    # that the divergence is proportional to the energy or count.
    order = np.argsort(points)
    xs, ys = points[order], values[order]
    if len(xs) < 2 or xs[-1] - xs[0] < 1e-6:
        return float(ys[0] + x - xs[0])
    at = int(np.clip(np.searchsorted(xs, x) - 1, 0, len(xs) - 2))
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    return float(ys[at] + max(slope, 0.0) * (x - xs[at]))
