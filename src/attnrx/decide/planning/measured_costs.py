"""Measures cost tables for latency: the time of a block on this machine, for every rank and number of tokens.

The timed blocks run in PyTorch or in the runtime of an export format, e.g. ONNX Runtime.
"""

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from attnrx.change.realization import realize
from attnrx.data import ImageSet
from attnrx.decide.planning.cost_table import (
    STAGES,
    STAGES_OF_FILES,
    CostTable,
    bounded,
    corrected,
    exact_cost_table,
    never_slower,
    saving_factor,
    staged_models,
    with_savings,
)
from attnrx.decide.planning.space import RANKS, TOKENS, Choices, Space, format_of
from attnrx.exporting import (
    Baseline,
    Draft,
    Exported,
    Format,
    PartDraft,
    dtype_name,
    few_images,
    parse_format,
    precision_for,
    without_blocks,
    written_files,
)
from attnrx.nouns.effort import LONG_PASS, MIN_TIMED_IMAGES, ROUND_FACTOR, PlanSettings, final_rounds
from attnrx.support.errors import AttnrxError, NotSupported
from attnrx.support.hardware import Load, cache_folder, device_name, governor, may_measure
from attnrx.support.modules import copy_module
from attnrx.support.optional import installed_versions
from attnrx.support.progress import Log, no_log, track
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import read_tensors, write_tensors
from attnrx.support.subprocess_runner import run_in_subprocess
from attnrx.vit.costs import Conditions, LatencyComparison, LatencyProtocol, compare_latencies, interleave
from attnrx.vit.costs.measured import PRECISIONS, PROCESSES, busy_text, is_busy
from attnrx.vit.kernels.compilation import kernel_version
from attnrx.vit.models import (
    ModuleCall,
    TokenReduction,
    TokenRun,
    attach_tokens_,
    blocks_of,
    family_of,
    recording_calls,
    timed_form,
)
from attnrx.vit.models.working.adopted import LastLayer
from attnrx.vit.tokens import TokenPolicy

# Blocks are timed at these shares of all tokens. Times in between are interpolated.
TIMED = (0.25, 0.5, 0.75, 1.0)
# Kernels compute tokens in groups, e.g. 16 in a vector, so the time rises in steps. To find these steps, the unchanged
# block is timed at every multiple of FINE tokens. A format's runtime may compile for each number of tokens, so it is
# timed only at every FINE_IN_FILES tokens. For long passes, the steps are not timed. In PyTorch, a pass is long from
# LONG_PASS multiply-accumulates on, and in a format's runtime from LONG_PASS_IN_FILES on.
FINE, FINE_IN_FILES, LONG_PASS_IN_FILES = 8, 16, 1e11
# The timed stage is before layer STAGE_LAYER (counted from 1), and keeps STAGE_KEEP of the patches. The timed block is
# the next layer, or STAGE_LAYER itself if it is the last.
STAGE_LAYER, STAGE_KEEP = 2, 0.75
# How many successive blocks are timed together in a format's runtime. There, one call costs as much as a part of a
# block. Timing a call without blocks would account for only half of this cost.
BLOCKS_OF_FORMAT = 4
HEADER = 64  # bytes in a safetensors file for every tensor, in addition to its name
# A plan gives up after measuring ATTEMPTS implausible tables. A table is stored only if its timings spread by less than
# STEADY, and if the unchanged model takes less than SLOWEST times the original's latency. Both numbers rise if other
# processes run, because kernels then wait for threads.
ATTEMPTS, STEADY, SLOWEST = 3, 0.3, 1.3
OLDEST = 30  # days after which a table is measured again
REFERENCE, ALL = "original", "all"
# The folders of attnrx whose code affects timings: models, compressed layers and files, and the measurements.
PACKAGE, MEASURED_CODE = Path(__file__).parents[2], (("vit", "change", "exporting", "decide/planning"))


@cache
def measured_code() -> str:
    """Returns a hash of the source files in MEASURED_CODE."""
    # The version number is not enough, because code may change between releases, e.g. in a checkout.
    files = sorted(path for folder in MEASURED_CODE for path in (PACKAGE / folder).rglob("*.py"))
    digest = sha256()
    for path in files:
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cached_cost_table(space: Space, settings: PlanSettings, measure: Callable[[], CostTable]) -> CostTable:
    """Returns the cost table for a model of this shape under these conditions. Measures it if no table is stored.

    Tables stay in the cache folder for OLDEST days. A stored table is used only on the same hardware with the same CPU
    governor. The versions of torch and the runtime, attnrx's code (`measured_code`) and its kernels must also be the
    same.

    If a measured table is implausible (`CostTable.problem`), it is measured again. If other processes ran during the
    measurement, or if the timings are noisy, the problem is logged, and the table is used but not stored.

    Raises:
        NotSupported: Tables were measured ATTEMPTS times, and all of them were implausible.
    """
    family = family_of(space.model)
    # Latency does not depend on weights, so they are not part of the key. All models of one architecture share a table.
    shape = (family.name, family.input_shape(space.model), [layer.spec for layer in family.attention(space.model)])
    linear = [[repr(one) for one in pair] for pair in family.mlp(space.model)]
    outside = family.costs(space.model).macs  # includes the parts around the blocks, e.g. a decoder
    form = format_of(settings)
    facts = (
        device_name(str(settings.conditions.device)),
        governor(),
        torch.__version__,
        measured_code(),
        kernel_version(),
        {} if form is None else installed_versions(*form.libraries),
    )
    # The token layout is part of the key. A model with another patch size has the same layers and input shape, but
    # another number of tokens.
    choices = space.axes, str(space.reducer), space.form, space.multiple, space.width_multiple
    timing = [settings.protocol, settings.batch, settings.whole_rounds, settings.timed_levels, settings.in_subprocess]
    timing.append(form)
    request = (facts, shape, space.shape.layout, linear, outside, timing, choices)
    path = cache_folder() / "costs" / f"{sha256(repr(request).encode()).hexdigest()[:16]}.safetensors"
    if may_measure() and path.exists() and (days := (time.time() - path.stat().st_mtime) / 86_400) <= OLDEST:
        with suppress(AttnrxError, TypeError, ValueError):  # a damaged file is measured again
            stored: dict[str, Any] = {
                name: tensor.numpy() if tensor.ndim else tensor.item() for name, tensor in read_tensors(path).items()
            }
            table = CostTable("latency", **stored)
            if table.problem() is None:
                settings.log(f"cost table of an earlier plan, {days:.0f} days old: {path}")
                return table
        settings.log(f"the stored cost table is damaged or implausible, and measured again: {path}")
    problem: str | None = None
    nothing = Choices.nothing(space.depth)
    for attempt in range(ATTEMPTS):
        load = Load()
        table = measure()
        taken = load.taken(settings.conditions.threads or torch.get_num_threads())
        problem = table.problem()
        if problem is None and not attempt and (unchanged := table.total(nothing)) > SLOWEST:
            # Usually, other processes delayed a thread for which the kernels waited.
            problem = f"the unchanged model took {unchanged:.2f} of the time that it takes in its own library"
        if problem is None:
            break
        settings.log(f"cost table: {problem}; measuring again")
    else:
        raise NotSupported(
            f"the latency of this model's blocks cannot be measured here: of {ATTEMPTS} cost tables none is possible "
            f"({problem}). Other processes take this machine's time: end them, or give a target in macs or params."
        )
    if is_busy(taken):
        settings.log(f"cost table: {busy_text(taken)}. The plan relies on it, and later plans measure again.")
        return table
    unchanged = table.total(nothing)
    if table.spread > STEADY or unchanged > SLOWEST:
        settings.log(
            f"cost table: the timings vary by {100 * table.spread:.0f} %, and the unchanged model took {unchanged:.2f} "
            "of the time that it takes in its own library. Of a busy machine, so it is not kept for later plans."
        )
        return table
    numbers = {field.name: getattr(table, field.name) for field in fields(table) if field.name != "quantity"}
    with suppress(AttnrxError):  # without a cache the next plan measures again
        # numpy converts the numbers to float64. torch would store floats in float32, so a cached plan would differ.
        write_tensors(path, {name: torch.from_numpy(np.asarray(number)) for name, number in numbers.items()})
    return table


def measured_cost_table(
    space: Space, protocol: LatencyProtocol, images: Float[Tensor, "batch channels height width"], levels: Sequence[int]
) -> CostTable:
    """Times the whole model, and one block at several levels and numbers of tokens, on a batch of images.

    After a stage that prunes or merges tokens, attention may be weighted by token sizes (proportional attention). The
    timed block then weights its attention, too. Each time is divided by the original block's time in the same round.
    Costs are relative to the unchanged model in attnrx's own code. The cost of token reducers is added later, by
    `corrected`. The times are fitted so that a lower rank is never slower.
    """
    timer, counts = _Timer(space, protocol, images), np.arange(space.shape.layout.tokens + 1)
    # Blocks are timed on a grid of levels and numbers of tokens. qk and vo share the attention kernel, and affect each
    # other's time, so they are timed in all pairs. The MLP is timed separately. The rest of the table is interpolated,
    # made monotone, and scaled to the whole model's time.
    grid = timer.grid
    # [level of qk, level of vo, grid]: times of a whole block with the full MLP. The grid's last entry is the time
    # before any stage. The MLP table holds differences from these times, so adding both gives a block's time.
    attention = np.zeros((len(space.levels), len(space.levels), len(grid) + 1))
    qk, vo, mlp_levels = ((0, *space.measured(axis, levels)) for axis in RANKS)
    for level, other in track([(level, other) for level in qk for other in vo], "timing blocks"):
        attention[level, other] = timer.block({"qk": level, "vo": other})
    # Times are first interpolated along qk for measured levels of vo, and then along vo for all levels of qk.
    attention = between_levels(space, "vo", between_levels(space, "qk", attention, qk, 0), vo, 1)
    attention = never_slower(attention, space.available("qk"), space.available("vo"))
    mlp = np.zeros((len(space.levels), len(grid) + 1))
    for level in track(mlp_levels[1:], "timing MLPs"):
        mlp[level] = timer.block({"mlp": level}) - attention[0, 0]
    mlp = between_levels(space, "mlp", mlp, mlp_levels, 0)[:, None]
    mlp = never_slower(mlp, space.available("mlp"), from_zero=True)[:, 0]
    # The last block is timed only at full rank. Its share of another block's time is assumed to be equal at all levels.
    last = timer.last() / attention[0, 0]
    # All layers get the same table. Only the last layer may be cheaper, if it computes only the class token.
    tables = [
        np.stack([_interpolated(counts, grid, part)] * (space.depth - 1) + [_interpolated(counts, grid, last * part)])
        for part in (attention, mlp)
    ]
    steps = timer.steps(counts)
    return timer.whole(steps * tables[0], steps * tables[1])


def file_cost_table(
    space: Space,
    protocol: LatencyProtocol,
    images: Float[Tensor, "batch channels height width"],
    form: Format,
    baseline: Baseline,
    exact: CostTable,
    write: Callable[[Mapping[str, PartDraft]], Mapping[str, Exported]] = written_files,
) -> CostTable:
    """Times the whole model, and unchanged blocks at several numbers of tokens, in the runtime of an export format.

    `exact` contains the multiply-accumulates. `write` writes the files with parts of the model.

    Lower ranks are not timed one by one. The share of a block's time that a lower rank saves is assumed to be
    proportional to the share of multiply-accumulates that it saves. The factor is measured at one rank for each axis.
    """
    timer, counts = _Timer(space, protocol, images, form, write), np.arange(space.shape.layout.tokens + 1)
    times = timer.steps(counts) * _interpolated(counts, timer.grid, timer.block({}))
    of_mlp = exact.mlp[:, :1]  # [layer, 1, tokens]
    unchanged = (exact.attention[:, 0, 0] + of_mlp[:, 0])[timer.layers.start]
    # [tokens]: the time of one multiply-accumulate. A last block that computes only the class token has the same one.
    unit = np.divide(times, unchanged, out=np.zeros_like(times), where=unchanged > 0)
    attention, mlp = unit * (exact.attention + of_mlp[:, None]), unit * (exact.mlp - of_mlp)
    factors = {}
    for axis, (level, saved) in timer.saved().items():
        costs = mlp if axis == "mlp" else attention[:, :, 0] if axis == "qk" else attention[:, 0]
        predicted = costs[timer.layers, 0, -1] - costs[timer.layers, level, -1]
        factors[axis] = saving_factor(saved, float(predicted.mean()))
    return with_savings(timer.whole(attention, mlp, (baseline.unchanged, baseline.empty)), factors)


def represents_all(space: Space) -> bool:
    """Returns whether one block, timed at fewer tokens, represents all others.

    It does not if layers have different shapes, or if they merge the tokens of their own windows.
    """
    return len(set(family_of(space.model).specs(space.model))) == 1 and not space.merges_in_layers


def between_levels(space: Space, axis: str, times: np.ndarray, known: Sequence[int], dim: int) -> np.ndarray:
    """Interpolates times along `dim` between the `known` levels of an axis, as a linear function of the kept rank.

    Below the last known level, the line through the last two known levels is extrapolated.
    """
    # The weight depends on the kept share. Level numbers would not do, because `space.levels` may be unevenly spaced.
    complete, shares = np.moveaxis(times.copy(), dim, 0), np.array(space.levels)
    for level in set(space.available(axis)) - set(known):
        later = next((index for index, known_level in enumerate(known) if known_level > level), len(known) - 1)
        first, second = known[later - 1], known[later]
        weight = (shares[first] - shares[level]) / (shares[first] - shares[second])
        complete[level] = complete[first] + weight * (complete[second] - complete[first])
    return np.moveaxis(complete, 0, dim)


class _Called(nn.Module):
    """Runs successive blocks with the recorded arguments that their model passes them, e.g. rotary positions.

    Only the tokens are new. With a `reduction`, the blocks run as they do after a token stage, where every token has a
    size and a patch index. `last` is the model's shortcut for its last block. If `last` is set, the block computes only
    the class token.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        call: ModuleCall,
        last: LastLayer | None = None,
        reduction: TokenReduction | None = None,
    ):
        super().__init__()
        self.blocks, self.args, self.kwargs = nn.ModuleList(blocks), call.args, call.kwargs
        self.last, self.reduction = last, reduction

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        with ExitStack() as states:  # entered per call, because copies of the module have no such state
            if self.last is not None:
                states.enter_context(self.last.forward_pass(True))
            if self.reduction is not None:
                # Sizes make attention proportional. Patch indices make it gather position biases or rotations. Both
                # take time, whatever their values are.
                run, count = TokenRun(), tokens.shape[1] - self.reduction.shape.layout.prefix
                run.patches = self.reduction.shape.layout.patches
                run.sizes = 1 + 0 * tokens[..., 0]  # not a constant, because a runtime could fold it
                run.patch_indices = torch.arange(count, device=tokens.device).expand(len(tokens), -1)
                states.enter_context(self.reduction.continuing(run))
            for block in self.blocks:
                output = block(tokens, *self.args, **self.kwargs)
                tokens = output[0] if isinstance(output, tuple) else output
        # Without blocks, one operation remains, because a runtime might remove an empty module.
        return tokens if self.blocks else 2 * tokens


class _Timer:
    """Times whole models, and blocks at the numbers of tokens in `grid`, in one runtime.

    All times are relative to the time of the original block with all tokens. If the plan may prune tokens, the timed
    blocks are the blocks after a token stage. Otherwise, the first blocks of the model are timed.

    `write` writes files for the runtime of a `form`. Most files are needed in any case, so it gets them all at once,
    and can write several at the same time.
    """

    def __init__(
        self,
        space: Space,
        protocol: LatencyProtocol,
        images: Tensor,
        form: Format | None = None,
        write: Callable[[Mapping[str, PartDraft]], Mapping[str, Exported]] = written_files,
    ):
        self.space, self.protocol, self.images, self.form, self.write = space, protocol, images, form, write
        tokens = space.shape.layout.tokens
        # Without the token axis, the grid has only the full number of tokens. torch.export treats a size of 1 as fixed,
        # so there are at least two patches.
        least = min(space.shape.layout.prefix + 2, tokens)
        grid = self.grid = sorted({max(least, round(share * tokens)) for share in TIMED})
        self.conditions = protocol.conditions
        self.family, self.is_in_library = family_of(space.model), form is None
        self.prunes_tokens = TOKENS in space.axes
        first = min(STAGE_LAYER, space.depth - 1) if self.prunes_tokens else 0
        # The last layer is left out, because it may compute less.
        count = 1 if form is None else max(min(BLOCKS_OF_FORMAT, space.depth - 1 - first), 1)
        self.layers = range(first, first + count)
        # A real forward pass records a block's arguments, e.g. rotary tables, and the number of images per call, which
        # may be only a part of the batch. The pass is not compiled, because hooks would break graphs.
        to = self.conditions.device, PRECISIONS[self.conditions.precision]
        model, plain = copy_module(space.model).eval().to(*to), replace(self.conditions, compiled=False, graphs=False)
        blocks = blocks_of(model, self.family)[:1]
        with recording_calls(blocks, lambda call: call, by_image=True) as calls, plain.held():
            model(plain.prepare_images(images))
        self.call = calls[-1]
        width, count = space.shape.width, max(len(call.tokens) for call in calls)
        generator = torch.Generator().manual_seed(0)
        # Noise replaces the real tokens, because a block takes the same time for all values.
        self.rows = {n: torch.randn(count, n, width, generator=generator).to(*to) for n in grid}
        self.all_tokens = self.rows[grid[-1]]
        # The model may run a batch in chunks. `whole` then divides by the number of calls per block.
        self.parts = -(-len(images) // count)
        self.spreads: list[float] = []
        # The runs of the unchanged model's parts, and for files also the runs in which one axis has a middle level.
        self._ready: dict[tuple[nn.Module, range, bool, bool], Callable[[torch.Tensor], Any]] = {}
        self.pruned = {} if form is None else self._with_middle_levels()
        if form is not None:
            self._prepare_files()
        self.original = self._prepared(space.model, self.layers)
        # The time of a call without blocks, in units of the original block. A model is called only once, so this is
        # subtracted from the times of blocks.
        self.calls = dict.fromkeys(grid, 0.0)
        if form is not None:
            nothing = self._prepared(space.model, range(0))
            seconds = self._turns({str(n): partial(nothing, tokens) for n, tokens in self.rows.items()})
            self.calls = {n: seconds[str(n)] for n in grid}

    def _prepared(
        self, model: nn.Module, layers: range, shortened: bool = False, after_stage: bool = False
    ) -> Callable[[torch.Tensor], Any]:
        """Returns a function that runs these blocks in the runtime, as they run before or after a token stage."""
        key = model, layers, shortened, after_stage
        if key in self._ready:
            return self._ready[key]
        (run,) = self._runs([self._part(*key)])
        if model is self.space.model:
            self._ready[key] = run
        return run

    def _prepare_files(self) -> None:
        """Writes the files of all parts that are timed in any case."""
        own, layers = self.space.model, self.layers
        keys = [(own, layers, False, False), (own, range(0), False, False)]
        keys += [(own, layers, False, True)] if self.prunes_tokens else []
        keys += [(model, layers, False, False) for _, model in self.pruned.values()]
        self._ready |= zip(keys, self._runs([self._part(*key) for key in keys]), strict=True)

    def _runs(self, parts: Sequence[tuple[nn.Module, Tensor]]) -> list[Callable[[torch.Tensor], Any]]:
        """Returns a function that runs a part in the runtime, for every part and its example."""
        conditions, form = self.conditions, self.form
        if form is None:
            return [conditions.prepare(part) for part, _ in parts]
        to = conditions.device, PRECISIONS[conditions.precision]
        drafts = {
            f"part {index}": PartDraft(copy_module(part).eval().to(*to), example, form)
            for index, (part, example) in enumerate(parts)
        }
        files, threads = self.write(drafts), conditions.threads or torch.get_num_threads()
        return [files[name].opened(threads) for name in drafts]

    def _part(
        self, model: nn.Module, layers: range, shortened: bool, after_stage: bool
    ) -> tuple[nn.Module, Float[Tensor, "batch tokens width"]]:
        """Returns these blocks as one module, with an example of its input."""
        # After a stage, the example has fewer tokens. The full number could equal the size of a position table, and the
        # export would then treat it as fixed.
        rows, reduction, staged = self.rows[self.grid[0 if after_stage else -1]], None, model
        if after_stage:
            reducer, staged = self.space.reducer, copy.deepcopy(model)  # hooks are attached below
            assert reducer is not None
            policy = TokenPolicy(reducer, (STAGE_LAYER,), (STAGE_KEEP,))
            reduction = attach_tokens_(staged, self.family, policy)
            # The caller passes tokens as they are after a stage, so a stage inside the block must keep all of them.
            reduction.policy = replace(policy, keep=(1.0,))
        blocks = blocks_of(staged, self.family)[layers.start : layers.stop]
        return _Called(blocks, self.call, getattr(staged, "last", None) if shortened else None, reduction), rows

    def block(self, levels: Mapping[str, int]) -> np.ndarray:
        """Times a block with these levels of the axes, after a token stage, at every number of tokens in the grid.

        One more entry at the end of the result is the time with all tokens, before any token stage.
        """
        choices, model = Choices.nothing(self.space.depth), self.space.model
        for axis, level in levels.items():
            for layer in self.layers:
                choices = choices.with_choice(axis, layer, level)
        if any(levels.values()):
            model = realize(model, self.space.prescription(choices))
        return self._times(model, self.layers, False) / len(self.layers)

    def _with_middle_levels(self) -> dict[str, tuple[int, nn.Module]]:
        """Returns a middle level for each axis, and the model with this level in all layers."""
        space, found = self.space, dict[str, tuple[int, nn.Module]]()
        for axis in RANKS:
            if available := space.available(axis):
                level = available[len(available) // 2]
                found[axis] = level, realize(space.model, space.prescription(space.uniform(axis, level)))
        return found

    def saved(self) -> dict[str, tuple[int, float]]:
        """Returns a middle level for each axis, and the time that this level saves in a block with all tokens."""
        pruned = self.pruned.items()
        runs = {axis: partial(self._prepared(model, self.layers), self.all_tokens) for axis, (_, model) in pruned}
        seconds = self._turns(runs) if runs else {}
        return {axis: (level, 1 - seconds[axis] / len(self.layers)) for axis, (level, _) in pruned}

    def last(self) -> np.ndarray:
        """Returns the last block's times. If the model supports it, the last block computes only the class token."""
        depth = self.space.depth
        return self._times(self.space.model, range(depth - 1, depth), True)

    def steps(self, counts: np.ndarray) -> np.ndarray:
        """Returns factors [counts] that correct interpolated times, because the real time rises in steps.

        An interpolated time multiplied by its factor is the unchanged block's time. The factor is 1 where the block is
        not timed finely enough to show the steps.
        """
        macs = len(self.images) * self.family.costs(self.space.model).macs
        every, most = (FINE, LONG_PASS) if self.is_in_library else (FINE_IN_FILES, LONG_PASS_IN_FILES)
        if not self.prunes_tokens or self.conditions.on_cuda or macs >= most or counts[-1] <= 2 * every:
            return np.ones(len(counts))
        after = self._prepared(self.space.model, self.layers, after_stage=True)
        fine = [*range(max(self.grid[0] // every, 1) * every, counts[-1], every), counts[-1]]
        seconds = self._turns({str(n): partial(after, self.all_tokens[:, :n].contiguous()) for n in fine})
        times = np.array([seconds[str(n)] for n in fine]) - np.interp(fine, self.grid, [*self.calls.values()])
        # More tokens must not take less time.
        times = (np.maximum.accumulate(times) + np.minimum.accumulate(times[::-1])[::-1]) / 2
        # A number of tokens between two timed numbers takes as long as the larger one.
        stairs = times[np.searchsorted(fine, counts).clip(max=len(fine) - 1)]
        factors = stairs / np.interp(counts, [0, *self.grid], [0.0, *stairs[self.grid]]).clip(min=times[0] / counts[-1])
        return np.where((counts < fine[0]) | (counts == counts[-1]), 1.0, factors)

    def _times(self, model: nn.Module, layers: range, shortened: bool) -> np.ndarray:
        """Returns the time of these layers together, at every number of tokens. The last layer may be `shortened`."""
        before = self._prepared(model, layers, shortened)
        after = self._prepared(model, layers, shortened, True) if self.prunes_tokens else before
        runs = {str(n): partial(after, tokens) for n, tokens in self.rows.items()}
        seconds = self._turns({**runs, ALL: partial(before, self.all_tokens)})
        calls = [*self.calls.values(), self.calls[self.grid[-1]]]
        return np.array([seconds[name] for name in (*runs, ALL)]) - calls

    def _turns(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Returns every run's median time over the rounds, in units of the original block's time in the same round."""
        # Runs take turns with the original block. Other processes slow down both of them in a round, so their load
        # cancels in the ratio.
        runs, protocol = {**runs, REFERENCE: partial(self.original, self.all_tokens)}, self.protocol
        with self.conditions.held():
            # A single block runs once per turn. In a model, it follows other blocks, which leave little of it in the
            # caches. A format's blocks already follow each other, so their run is repeated.
            clock = protocol.resolved_clock
            repeated = not self.is_in_library
            seconds = interleave(runs, rounds=protocol.rounds, warmup=protocol.warmup, clock=clock, repeated=repeated)
        ratios = {name: len(self.layers) * times / seconds[REFERENCE] for name, times in seconds.items()}
        for name, values in ratios.items():
            if name != REFERENCE:
                low, middle, high = torch.quantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
                self.spreads.append((high - low) / middle)
        return {name: float(values.median()) for name, values in ratios.items()}

    def whole(self, attention: np.ndarray, mlp: np.ndarray, files: Sequence[Exported | None] = ()) -> CostTable:
        """Times the whole model and the model without blocks, and scales the block costs to a cost table.

        If you pass `files`, these exported files are timed in place of the two models.
        """
        space, images = self.space, self.conditions.prepare_images(self.images)
        # The time of all blocks together is the model's time minus its time with identity blocks in their place.
        models, runs = (space.model, without_blocks(space.model)), dict[str, Callable[[], object]]()
        for name, model, file in zip_longest(("own", "empty"), models, files):
            (run,) = self._runs([(model, images)]) if file is None else (file,)
            runs[name] = partial(run, images)
        seconds = self._turns(runs)
        # The unit is one call of the original block. A model that runs the batch in chunks calls it `parts` times.
        total, outside = seconds["own"] / self.parts, seconds["empty"] / self.parts
        # In a model, a block finds its input in the cache. So the block times are scaled to the whole model's time.
        scale = (total - outside) / float(attention[:, 0, 0, -1].sum())
        layout = space.shape.layout
        stages = np.zeros((space.depth, layout.tokens + 1))
        sizes = layout.prefix, layout.patches
        costs = total, outside, attention * scale, mlp * scale, stages
        return CostTable("latency", *costs, *sizes, spread=float(np.median(self.spreads)))


def _interpolated(counts: np.ndarray, grid: list[int], times: np.ndarray) -> np.ndarray:
    """Returns times for all numbers of tokens in `counts`, by linear interpolation between the timed numbers."""
    # `times` is [levels, grid + 1]. Its last entry is the time with all tokens before any stage, and is used for all
    # tokens. For smaller numbers, a stage precedes the block. The grid's own entry for all tokens, after a stage, only
    # serves as the end of the interpolation. No tokens take no time.
    flat = times.reshape(-1, len(grid) + 1)
    lines = [np.where(counts < grid[-1], np.interp(counts, [0, *grid], [0.0, *row[:-1]]), row[-1]) for row in flat]
    return np.stack(lines).reshape(*times.shape[:-1], len(counts))


def timing_conditions(
    model: nn.Module, threads: int | None, batch: int, form: Format | None = None, log: Log = no_log
) -> Conditions:
    """Returns the conditions under which a plan's models or files are timed.

    Models are timed in their own precision if possible, and files in their format's precision. On a CUDA device,
    forward passes are recorded as CUDA graphs if the model supports them.
    """
    # Neither models nor files are timed in float64.
    weight = next(model.parameters())
    precision = precision_for(model, form or parse_format("program")) or dtype_name(weight.dtype)
    # On one thread, latency can be measured by CPU time (`PlanTimer.settings`).
    threads = 1 if threads is None and torch.get_num_threads() == 1 else threads
    conditions = Conditions(str(weight.device), precision, threads)
    if not conditions.on_cuda or form is not None:
        return conditions
    # With fewer than a few hundred images, an eager pass takes as long as the CPU needs to launch its kernels. Its
    # time depends on the CPU's load, and hardly on what is removed.
    recorded = replace(conditions, graphs=True)
    images = recorded.prepare_images(torch.zeros(batch, *family_of(model).input_shape(model)))
    try:
        with recorded.held():
            recorded.prepare(model)(images)
    except NotSupported as problem:
        log(f"timed without CUDA graphs: {problem}")
        return conditions
    log("timed as CUDA graphs (Conditions(graphs=True).prepare records the result the same way)")
    return recorded


def final_protocol(conditions: Conditions, batch: int, model: nn.Module) -> LatencyProtocol:
    """Returns the protocol for timing final results: whole batches, measured by wall clock, in several processes."""
    rounds = final_rounds(batch, family_of(model).costs(model).macs)
    return LatencyProtocol(conditions, rounds, warmup=2, processes=PROCESSES)


class PlanTimer:
    """Times the models of plans in turns with the `baseline`. If a format is set, their exported files are timed.

    `images` calibrates the files.
    """

    def __init__(self, space: Space, requested: PlanSettings, images: ImageSet, baseline: Baseline | None = None):
        self.space, self.requested, self.images, self.log = space, requested, images, requested.log
        self._baseline = baseline
        self._written: WeakKeyDictionary[nn.Module, Exported] = WeakKeyDictionary()  # one file per plan

    @cached_property
    def settings(self) -> PlanSettings:
        """The settings for timings while the search runs."""
        return self.requested.while_planning(family_of(self.space.model).costs(self.space.model).macs)

    @cached_property
    def baseline(self) -> Baseline:
        """The reference for latencies, which is your model without attnrx, in PyTorch or as an exported file."""
        form = format_of(self.settings)
        if self._baseline is not None or form is None:
            return self._baseline or Baseline.eager(self.space.model)
        return Baseline.as_file(self.space.model, form, self.images, self.log, self.settings.in_subprocess)

    def cost_table(self) -> CostTable:
        """Returns the latency of blocks by rank and number of tokens, from the cache or by measurement."""

        def measure() -> CostTable:
            space, settings = self.space, self.settings
            form, noise = format_of(settings), settings.noise(space.model)
            # For files, `file_cost_table` has already measured the savings of ranks and hidden units.
            axes, stages = (RANKS, STAGES) if form is None else ((), STAGES_OF_FILES)
            staged, exact = staged_models(space, stages), exact_cost_table(space, "macs")
            if not represents_all(space):
                # One block's time says nothing about the others, so costs start from their multiply-accumulates.
                blocks, axes = replace(exact, quantity="latency"), RANKS
            elif form is None:
                # Blocks are timed in a separate process, and whole models in another one. Whole models were slower in a
                # process that had timed blocks.
                arguments, forked = (space, settings.protocol, noise, settings.timed_levels), settings.in_subprocess
                blocks = run_in_subprocess(measured_cost_table, *arguments, in_subprocess=forked, on_line=self.log)
            else:  # in this process, because the runtime of a format allocates its memory itself
                # The files of models with stages take long to write, so they are written beside the others.
                write = partial(self._files, dict(zip(map(str, staged), staged.values(), strict=True)))
                blocks = file_cost_table(space, settings.protocol, noise, form, self.baseline, exact, write)
            # All costs follow from the timing of a few files, so it takes more rounds.
            rounds = settings.whole_rounds * (1 if form is None else ROUND_FACTOR)
            table = corrected(blocks, space, partial(self.latency_shares, rounds=rounds), axes, staged)
            return bounded(table, exact)

        return cached_cost_table(self.space, self.settings, measure)

    def timings(self, models: Sequence[nn.Module]) -> list[dict[str, Any]]:
        """Times models or their files in turns with the baseline.

        Returns one record per model, with its speed relative to the baseline, the confidence interval, and the
        timing conditions.
        """
        settings, noise = self.settings, self.settings.noise(self.space.model)
        # Shorter rounds cost less, so there can be more of them, and their median is more precise.
        rounds = settings.whole_rounds * (ROUND_FACTOR if settings is not self.requested or settings.to else 1)
        protocol = replace(settings.protocol, rounds=rounds)
        if settings.to is None:
            if settings.batch < self.requested.batch <= MIN_TIMED_IMAGES:
                # A part of so few images would not represent the batch. With decoders and chunks, the speed was 1.53x
                # at 4 images, and 1.58x at 8.
                settings = replace(settings, batch=self.requested.batch)
                noise = settings.noise(self.space.model)
            macs = settings.batch * family_of(self.space.model).costs(self.space.model).macs
            if settings.adjusts and macs >= LONG_PASS:
                protocol = replace(protocol, rounds=max(rounds // 3, 2), warmup=1)
        named = {str(index): model for index, model in enumerate(models)}
        speeds = self._compared(named, noise, protocol)
        return [self._record(speed, settings) for speed in speeds.values()]

    def _record(self, speed: LatencyComparison, settings: PlanSettings) -> dict[str, Any]:
        return {
            "faster": speed.faster.value,
            "low": speed.faster.low,
            "high": speed.faster.high,
            "batch": self.requested.batch,
            "timed_batch": settings.batch,
            "threads": speed.threads,
            "hardware": speed.hardware,
            "precision": settings.conditions.precision,
            "graphs": settings.conditions.graphs,
            **({"plain": True} if settings.conditions.plain else {}),  # in the library's own code
            **({"to": settings.to} if settings.to else {}),
            "clock": self.requested.protocol.resolved_clock,
            "rounds": speed.rounds,
            "in_subprocess": settings.in_subprocess,
            "torch": speed.torch_version,
        }

    def megabytes(self, model: nn.Module) -> float:
        """Returns the size in megabytes of the model's exported file or, without a format, of its weights."""
        if self.settings.to is None:
            # A weight with several names is stored once for each of them.
            return sum(each.nbytes + len(name) + HEADER for name, each in model.state_dict().items()) / 1e6
        return self._files({"": model})[""].bytes / 1e6

    def latency_shares(self, models: Mapping[str, nn.Module], rounds: int) -> dict[str, float]:
        """Times models or their files in turns with the baseline. Returns each latency divided by the baseline's."""
        protocol = replace(self.settings.protocol, rounds=rounds, warmup=1)  # whole models take longer than blocks
        speeds = self._compared(models, self.settings.noise(self.space.model), protocol)
        return {name: 1 / comparison.faster.value for name, comparison in speeds.items()}

    def _compared(
        self, models: Mapping[str, nn.Module], images: Tensor, protocol: LatencyProtocol
    ) -> dict[str, LatencyComparison]:
        settings, baseline = self.settings, self.baseline.model
        if settings.to is not None:
            # Files run in this process, because their runtime allocates its memory itself.
            return compare_latencies(self._files(models), baseline, images, protocol)
        timed = {name: timed_form(model, settings.conditions.in_kernels) for name, model in models.items()}
        return run_in_subprocess(
            compare_latencies, timed, baseline, images, protocol, in_subprocess=settings.in_subprocess, on_line=self.log
        )

    def _files(
        self, models: Mapping[str, nn.Module], parts: Mapping[str, PartDraft] | None = None
    ) -> dict[str, Exported]:
        """Writes files for timing. They run the same operations as final files, but are calibrated on fewer images.

        With `parts`, also writes parts of models, and returns their files.

        Raises:
            NotSupported: A model or a part cannot be written in the format.
        """
        form, few, known = format_of(self.settings), few_images(self.images), self._written
        assert form is not None
        if (unchanged := self.baseline.unchanged) is not None:
            known[self.space.model] = unchanged
        drafts = {name: Draft.of(model, form, few) for name, model in models.items() if model not in known}
        made = written_files({**drafts, **(parts or {})}, self.settings.in_subprocess)
        known |= {models[name]: made[name] for name in drafts}
        return made | {name: known[model] for name, model in models.items()}
