"""What every choice of a plan does to the answers: measured alone, one layer at a time, and taken to add up."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from attnrx.checks.fidelity import divergence
from attnrx.models import Family, attach_tokens_, evaluating, family_of
from attnrx.models.blocks import block_names
from attnrx.planning.partial_forward import as_output, recorded, resumed
from attnrx.planning.reference_outputs import Answers, Pixels, log_probabilities, softened_divergence
from attnrx.planning.space import RANKS, TOKENS, Choices, Space
from attnrx.prescription import OutputDecision
from attnrx.progress import Log
from attnrx.realization import realize
from attnrx.shapes import Float, Tensor
from attnrx.tokens import ALL_LAYERS, TokenPolicy

Weights = Mapping[str, np.ndarray]
Measure = Callable[[Float[Tensor, "images classes"], Float[Tensor, "images classes"]], Float[Tensor, "images"]]

# The levels (places in LEVELS) at which the answers are measured, and the shares of the patches that leave.
PROBED = (2, 4)
PRUNED_SHARES = (1 / 24, 1 / 8, 1 / 3, 2 / 3, 11 / 12)
LEAST = 1e-9
# How far answers are from the original's, as in `Deviation`.
MEASURES: dict[str, Measure] = {"divergence": divergence, "softened": softened_divergence}


@dataclass(frozen=True, eq=False)
class Sensitivities:
    """The mean divergence of the answers, as it is or softened, that each choice alone brings about.

    `ranks` is [layer, level] for every axis. Of the tokens `places` and `tokens` [layer, place] hold the logarithms of
    what was measured at some numbers of patches that leave; between and beyond, the divergence grows as a power of
    their number. Where some have left before, it is what leaves in addition that counts: those that are left are less
    alike.
    """

    ranks: Mapping[str, np.ndarray]
    places: np.ndarray
    tokens: np.ndarray
    patches: int
    _known: dict[tuple[int, int], float] = field(default_factory=dict, repr=False)

    def of_pruning(self, layer: int, count: int, present: int) -> float:
        """Returns what it costs that so many of the patches that are there leave before a layer."""
        if not count:
            return 0.0
        gone = self.patches - present
        return self._of_gone(layer, gone + count) - self._of_gone(layer, gone)

    def _of_gone(self, layer: int, gone: int) -> float:
        if not gone:
            return 0.0
        key = (layer, gone)
        if key not in self._known:
            self._known[key] = math.exp(_on_line(math.log(gone), self.places, self.tokens[layer]))
        return self._known[key]

    def total(self, choices: Choices, weights: Weights) -> float:
        """Adds up what all choices cost; `weights` [layer] multiply those of an axis."""
        found, present = 0.0, self.patches
        for layer, count in enumerate(choices.num_pruned):
            for axis in RANKS:
                found += float(self.ranks[axis][layer, getattr(choices, axis)[layer]] * weights[axis][layer])
            found += self.of_pruning(layer, count, present) * float(weights[TOKENS][layer])
            present -= count
        return found


def measure_sensitivities(space: Space, answers: Answers, log: Log) -> dict[str, Sensitivities]:
    """Measures every axis at a few levels in every layer alone; the error that ranks leave out says what lies between.

    Gives the damages by every one of MEASURES.

    The layers before the one that is changed are run once for all; what a rank leaves out is the energy of the
    directions beyond it, in the metric of the data, which the prescriptions know.
    """
    probes = {
        (axis, level): realize(space.model, piece)
        for axis in RANKS
        for level in PROBED
        if level in space.available(axis) and (piece := space.piece(axis, level)) is not None
    }
    counts = sorted({max(space.step, round(share * space.patches)) for share in PRUNED_SHARES})
    counts = counts if TOKENS in space.axes else []
    measured = {key: np.zeros((space.depth, len(MEASURES))) for key in probes}
    num_pruned = np.zeros((space.depth, len(counts), len(MEASURES)))
    passing = _Passing(space, family_of(space.model))
    with evaluating([space.model, *probes.values()]):
        for done, (images, logs) in enumerate(answers.parts(), 1):
            passing.take(images, logs)
            for key, probe in probes.items():
                measured[key] += passing.with_block_of(probe)
            for place, count in enumerate(counts):
                num_pruned[:, place] += passing.with_num_pruned(count)
            log(f"damages: {done} of {len(answers.batches)} batches")
    places, found = np.log(np.array(counts or [1], dtype=float)), {}
    for index, name in enumerate(MEASURES):
        own = {key: sums[:, index] for key, sums in measured.items()}
        ranks = {axis: _curves(space, axis, own, len(answers)) for axis in RANKS}
        logs = np.log(np.maximum(num_pruned[:, :, index] / len(answers), LEAST))
        found[name] = Sensitivities(ranks, places, logs, space.patches)
    return found


class _Passing:
    """One batch, what every block of the original was given and gave, and what changes when one block is another."""

    def __init__(self, space: Space, family: Family):
        self.space, self.family = space, family

    def take(self, images: Pixels, logs: Float[Tensor, "batch classes"]) -> None:
        self.images, self.logs = images, logs
        with recorded(self.space.model, self.family) as blocks:
            self.space.model(images)
            self.inputs = [given for given, _ in blocks]
            self.kind = blocks[0][1]

    def with_block_of(self, other: nn.Module) -> np.ndarray:
        """Sums every measure over the images when a layer is that of another model, layer by layer."""
        found = np.zeros((len(self.inputs), len(MEASURES)))
        for layer, name in enumerate(block_names(other, self.family)):
            output = other.get_submodule(name)(self.inputs[layer])
            found[layer] = self._from(self.space.model, output, layer + 1)
        return found

    def with_num_pruned(self, count: int) -> np.ndarray:
        """Sums every measure over the images when so many patches leave before a layer, layer by layer."""
        found, reducer = np.zeros((len(self.inputs), len(MEASURES))), self.space.reducer
        assert reducer is not None
        needs = set(reducer.needs)
        for layer in range(1, len(self.inputs)):
            changed = copy.deepcopy(self.space.model)
            keep = (self.space.patches - count) / self.space.patches
            attach_tokens_(changed, self.family, TokenPolicy(reducer, (layer + 1,), (keep,)))
            # What a reducer must see, it must be shown: by the layer before, or by all of them.
            start = 0 if needs & ALL_LAYERS else layer - 1 if needs else layer
            found[layer] = self._from(changed, as_output(self.inputs[start], self.kind), start)
        return found

    def _from(self, model: nn.Module, given: Any, layer: int) -> list[float]:
        with resumed(model, self.family, given, layer):
            answered = log_probabilities(model(self.images))
        return [float(measure(self.logs, answered).sum()) for measure in MEASURES.values()]


def _curves(space: Space, axis: str, measured: Mapping[tuple[str, int], np.ndarray], images: int) -> np.ndarray:
    """Returns [layer, level]: through what was measured, in proportion to the error left out."""
    found = np.zeros((space.depth, len(space.levels)))
    known = {level: sums / images for (own, level), sums in measured.items() if own == axis}
    if not known:
        return found
    errors = {level: _errors(space, axis, level) for level in space.available(axis)}
    for layer in range(space.depth):
        places = np.log([max(errors[level][layer], 1e-30) for level in known])
        logs = np.log([max(own[layer], LEAST) for own in known.values()])
        for level, own in errors.items():
            found[layer, level] = math.exp(_on_line(math.log(max(own[layer], 1e-30)), places, logs))
    return np.maximum.accumulate(found, axis=1)


def _errors(space: Space, axis: str, level: int) -> list[float]:
    piece = space.piece(axis, level)
    assert piece is not None
    if axis == "qk":  # what a prescription says of directions that leave need not be their strengths
        layers = zip(space.spectra, piece.layers, strict=True)
        return [float((own.strength.square() * own.used * ~layer.qk.keep).sum()) for own, layer in layers]
    return [sum(_removed_energy(own) for own in layer.outputs.values()) for layer in piece.layers]


def _removed_energy(output: OutputDecision) -> float:
    energies = output.strength.square().sort(dim=-1, descending=True).values
    return sum(float(own[rank:].sum()) for own, rank in zip(energies, output.ranks, strict=True))


def _on_line(place: float, places: np.ndarray, values: np.ndarray) -> float:
    """Goes along straight lines between the points, and on beyond the last of either end; one point has slope 1."""
    order = np.argsort(places)
    xs, ys = places[order], values[order]
    if len(xs) < 2 or xs[-1] - xs[0] < 1e-6:
        return float(ys[0] + place - xs[0])
    at = int(np.clip(np.searchsorted(xs, place) - 1, 0, len(xs) - 2))
    slope = (ys[at + 1] - ys[at]) / (xs[at + 1] - xs[at])
    return float(ys[at] + max(slope, 0.0) * (place - xs[at]))
