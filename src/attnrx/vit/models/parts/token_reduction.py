"""Prunes or merges tokens in stages, which run before some layers of a model. A reducer selects each stage's tokens.

Some outputs need a token for every patch, so pruned and merged patches can be restored. A restored patch is the sum of
two terms: the current value of the token that represents it, and the difference between the patch and this token at the
stage. A copy of the token alone would lose this difference.

Later layers change these differences, so the differences are scaled. For a stage before layer l, the scale at the
output of layer n is l / n. Of the scales that we measured, this one has the smallest error (docs/results/dense.md).

Patches are restored from the last stage to the first, and only after blocks whose output needs all patches. These
blocks return the restored tokens, so library methods that collect block outputs get the features of all patches.
`TokenReduction.leave` stores the remaining tokens after a block, and `enter` passes them to the next block.
"""

import sys
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import is_recorded, is_traced
from attnrx.support.shapes import Float, ImageBatch, Int, Tensor, TokenBatch
from attnrx.vit.attention import CapturedAttention
from attnrx.vit.kernels.native_attention import can_merge
from attnrx.vit.maps import REALIZATIONS
from attnrx.vit.models.parts.record import TOKENS
from attnrx.vit.tokens import (
    LayerStatistic,
    Reduction,
    Shape,
    TokenPolicy,
    TokenState,
    counted,
    destinations_of,
    gathered_rows,
)
from attnrx.vit.tokens.reducer import stable_order

TINY = 1e-20  # added to sizes of 0, so their logarithm has a gradient. It is too small to give the token any weight


@dataclass
class RestorableStage:
    """Stores the patch tokens before and after a pruning stage, and which remaining token represents each patch.

    The stage runs before layer number `layer`, counted from 1. `destinations` holds, for each patch, the index of its
    representative among the remaining tokens. A pruned patch has no representative and gets -1. `prunes` is true if
    any patch was pruned. If pruned tokens are masked, `positions` holds the remaining tokens' indices among all patch
    tokens. If pruned tokens are removed, `positions` is None.
    """

    layer: int
    before: Float[Tensor, "batch before width"]
    remaining: Float[Tensor, "batch left width"]
    destinations: Int[Tensor, "batch before"]
    prunes: bool = False
    positions: Int[Tensor, "batch left"] | None = None
    # A cached_property in Python 3.11 has a lock that compilers cannot trace, so a plain attribute is used.
    _sources: Tensor | None = None

    @property
    def sources(self) -> Int[Tensor, "batch before"]:
        """For each patch, the index of the remaining token from which the patch is restored.

        A merged or kept patch is restored from the token that represents it. A pruned patch is restored from the
        remaining token with the highest cosine similarity.
        """
        if self._sources is None and not self.prunes:
            self._sources = self.destinations.clamp(min=0)  # patches that an earlier stage masked have -1
        elif self._sources is None:
            # Cosines of all [before, remaining] pairs. They are computed on first use, because few stages are restored.
            unit = nn.functional.normalize(self.remaining, dim=-1)
            similarity = nn.functional.normalize(self.before, dim=-1) @ unit.transpose(1, 2)
            self._sources = torch.where(self.destinations < 0, similarity.argmax(-1), self.destinations)
        return self._sources

    def restored(
        self, patches: Float[Tensor, "batch after width"], num_layers: int
    ) -> Float[Tensor, "batch before width"]:
        """Returns the patches that existed before the stage, restored from the output of the first `num_layers` layers.

        `patches` are the remaining patches in this output. A restored patch is its source token in this output, plus a
        fraction of the difference between the patch and its source token at the stage.
        """
        # Computes patches[source] + share * (before - remaining[source]). One gather is enough for both terms.
        remaining = patches if self.positions is None else gathered_rows(patches, self.positions)
        share = self.layer / num_layers
        change = torch.sub(remaining, self.remaining, alpha=share)
        return torch.add(gathered_rows(change, self.sources), self.before, alpha=share)


class CallState(threading.local):
    """The base class for state that modules pass to each other during a forward pass.

    The state is not passed as an argument, because modules keep their library's signatures. At the end of the pass, the
    state is removed. Each thread has its own state, because threads may run a model on different images at the same
    time. Copies and pickles of a model contain no state, even if they are made during a pass.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @contextmanager
    def setting(self, **values: Any) -> Iterator[None]:
        """Sets attributes inside the context, and restores their earlier values at its end, even after an exception.

        A user's hook may run the model while a forward pass of the same model is running. This outer pass then needs
        the earlier values again.
        """
        before = {name: getattr(self, name) for name in values}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)


class TokenRun:
    """The token statistics of one batch in one forward pass.

    `sizes` is None until tokens are pruned or merged. `patches` is the number of patches per image, set at the first
    stage. `patch_indices` holds each patch token's index in the image, or -1 for tokens that a stage added. `trail`
    lists the indices of the remaining patches after every stage.

    `stages` holds one `RestorableStage` per stage. It is None unless patches are tracked or features of all patches are
    requested. Blocks in `restored_blocks` return features of all patches. `present` holds the remaining tokens after
    such a block, and `pooled` the remaining tokens after the last block and its norm. `image_keys` contains one integer
    per image, which the reducer computes.

    In training, `sampled` holds the differentiable mask of each stage, with 1 for a kept patch and 0 for a pruned
    patch. A stage that keeps every patch has no mask.
    """

    def __init__(self, restored_blocks: Container[int] = (), is_tracked: bool = False):
        self.restored_blocks = restored_blocks
        self.stages: list[RestorableStage] | None = [] if is_tracked else None
        self.present: TokenBatch | None = None
        self.pooled: TokenBatch | None = None
        self.sizes: Float[Tensor, "batch tokens"] | None = None
        self.logarithms: tuple[Tensor, Tensor] | None = None  # sizes and their logarithms, computed once per stage
        self.patches = 0
        self.patch_indices: Int[Tensor, "batch patches"] | None = None
        self.statistic: LayerStatistic | None = None
        self.image_keys: Int[Tensor, " batch"] | None = None
        self.captured = CapturedAttention()
        self.trail: list[Int[Tensor, "batch kept"]] = []
        self.sampled: dict[int, Float[Tensor, "batch patches"]] = {}
        self.is_past_blocks = False

    def representatives(self, layer: int | None = None) -> Int[Tensor, "batch patches"] | None:
        """Returns, for each patch, the index of its representative among a layer's patch tokens (-1 if it was pruned).

        The default `layer` is the last layer. The result is None if no patch was pruned or merged. It is also None if
        neither tracking nor features of all patches were requested.
        """
        # The tokens after a stage are the patches of the next stage. So the destinations are composed from the first
        # stage to the last.
        representatives = None
        for stage in self.stages or ():
            if layer is not None and stage.layer > layer:
                break
            after = stage.destinations
            if representatives is not None:
                # Patches that were pruned earlier have the index -1, which gather refuses.
                after = after.gather(1, representatives.clamp(min=0)).masked_fill(representatives < 0, -1)
            if stage.positions is not None:
                after = stage.positions.gather(1, after.clamp(min=0)).masked_fill(after < 0, -1)
            representatives = after
        return representatives


class _ReductionCall(CallState):
    """The state of a forward pass: its `TokenRun`, and the list in which `recording_tokens` collects runs.

    If `is_inside` is true, a `forward_pass` context ends the run. If not, the model's last hook ends the run.
    `predictors` are the called model's own predictors. `DataParallel` replicas need them, because a replica's hooks
    refer to the original model's reduction, whose weights are on another device. If `tracked` is true, runs record
    which token represents each patch.
    """

    def __init__(self) -> None:  # runs once in every thread
        self.run: TokenRun | None = None
        self.is_inside = False
        self.predictors: nn.ModuleList | None = None
        self.restored_blocks: Container[int] | None = None
        self.runs: list[TokenRun] | None = None
        self.tracked = False
        self.outer: list[tuple[Any, ...]] = []  # the states that `enter_pass` replaced


class TokenReduction(nn.Module):
    """Prunes or merges tokens in one model. `by="compress"` removes pruned tokens, and `by="mask"` only masks them.

    A masked token keeps its index and gets size 0. No other token attends to a masked token, and pooling ignores it. In
    training, a learned reducer always masks tokens. The reducer samples which patches are kept, so their number may
    vary. Gradients flow from the tokens to the samples, and are bounded for dropped patches (`sized_softmax`).

    `restored_blocks` are the indices of the blocks after which the tokens of all patches are restored.

    The `TokenRun` of a pass exists only during the pass, unless `recording_tokens` keeps it. If you call a library
    method of the inner model that stops before the last block, the run remains until the same thread starts another
    pass.
    """

    def __init__(self, policy: TokenPolicy, shape: Shape, by: str):
        super().__init__()
        if by not in REALIZATIONS:
            raise InvalidInput(f"by={by!r}: choose from {', '.join(REALIZATIONS)}.")
        self.policy, self.shape, self.by = policy, shape, by
        predictors = 1 if policy.reducer.one_predictor else len(policy.layers)
        self.stages = nn.ModuleList(policy.reducer.predictor(shape) for _ in range(predictors))
        self.call = _ReductionCall()
        self.restored_blocks: Container[int] = ()

    def __prepare_scriptable__(self) -> "TokenReduction":
        raise NotSupported(
            "torch.jit.script reads no model that prunes or merges tokens: trace it with torch.jit.trace or "
            "torch.export, or write a file with attnrx.export(model, path)."
        )

    @contextmanager
    def forward_pass(self, restored_blocks: Container[int] | None = None) -> Iterator[None]:
        """Lets the model run a forward pass in the context, and then removes its `TokenRun`, even after an exception.

        If you pass `restored_blocks`, only these blocks return the tokens of all patches.
        """
        call, before = self.call, self.call.run
        blocks = call.restored_blocks if restored_blocks is None else restored_blocks
        with call.setting(run=before, is_inside=True, restored_blocks=blocks, predictors=self.stages):
            yield
            if call.run is not before:
                self._end()

    def enter_pass(self, restored_blocks: Container[int], predictors: nn.ModuleList) -> None:
        """Starts a forward pass from a hook, like the context `forward_pass`. The method `leave_pass` ends the pass."""
        call = self.call
        if not is_traced():
            self._forget_interrupted()
        before = call.run, call.is_inside, call.restored_blocks, call.predictors
        call.outer.append((0 if is_traced() else id(sys._getframe(2)), before))
        call.is_inside, call.restored_blocks, call.predictors = True, restored_blocks, predictors

    def leave_pass(self) -> None:
        """Ends the pass that `enter_pass` started, and removes its statistics."""
        call, (_, before) = self.call, self.call.outer.pop()
        if call.run is not before[0]:
            self._end()
        call.run, call.is_inside, call.restored_blocks, call.predictors = before

    def _forget_interrupted(self) -> None:
        """Removes passes that Ctrl-C interrupted before their last hook (they have no frame on the call stack)."""
        call, frame, present = self.call, sys._getframe(), set[int]()
        while call.outer and frame is not None:
            present.add(id(frame))
            frame = frame.f_back
        while call.outer and call.outer[-1][0] not in present:
            _, (call.run, call.is_inside, call.restored_blocks, call.predictors) = call.outer.pop()

    def forward(self, outputs: Any) -> Any:
        """Returns the input unchanged, because containers such as nn.Sequential also call this submodule."""
        return outputs

    @contextmanager
    def continuing(self, run: TokenRun) -> Iterator[None]:
        """Lets single blocks run in the context, as if they continued the forward pass of `run`."""
        with self.forward_pass():
            self.call.run = run
            yield

    def _end(self) -> None:
        run, self.call.run = self.call.run, None
        if run is not None and self.call.runs is not None:
            self.call.runs.append(run)

    def _end_outside(self) -> None:
        """Ends a run after its last hook, unless a `forward_pass` context will end the run later."""
        if not self.call.is_inside:
            self._end()

    @property
    def _run(self) -> TokenRun:
        """The run of the current forward pass. Outside a forward pass, a new run is returned and not stored."""
        run = self.call.run
        return TokenRun() if run is None else run

    @property
    def samples_patches(self) -> bool:
        """Whether kept patches are sampled (in training), so that gradients reach the predictors."""
        return self.training and self.policy.reducer.learned

    @property
    def counts_sizes(self) -> bool:
        """Whether the attention must weight tokens by their sizes."""
        return self.by == "mask" or self.policy.reducer.proportional or self.samples_patches

    def sizes(self, windows: int = 1) -> Float[Tensor, "batch tokens"] | None:
        """Returns token sizes for proportional attention over `windows` windows at once, or None if all sizes are 1."""
        sizes = self._run.sizes if self.counts_sizes else None
        return sizes if sizes is None or windows == 1 else sizes.reshape(-1, windows * sizes.shape[1])

    def log_sizes(self, windows: int = 1) -> Float[Tensor, "batch tokens"] | None:
        """Returns the logarithms of `sizes`. They are computed once per stage."""
        run, sizes = self._run, self.sizes()
        if sizes is None:
            return None
        if windows > 1:
            return sizes.log().reshape(-1, windows * sizes.shape[1])
        if is_recorded():
            return sizes.log()
        if run.logarithms is None or run.logarithms[0] is not sizes:
            # Rows start at multiples of 8 numbers, or else every fused kernel would pad a copy of its mask.
            count = sizes.shape[1]
            logs = sizes.new_empty(len(sizes), -(-count // 8) * 8)[:, :count]
            run.logarithms = sizes, logs.copy_(sizes).log_()  # because torch.vmap does not support log(out=...)
        return run.logarithms[1]

    def kept_patches(self) -> Int[Tensor, "batch patches"] | None:
        """Returns each patch token's index in the image (-1 for added tokens), or None before the first stage."""
        return self._run.patch_indices

    def predictor(self, stage: int) -> nn.Module:
        """Returns the module that predicts which patches a stage keeps. All stages may share one module."""
        predictors = self.call.predictors or self.stages
        return predictors[0 if self.policy.reducer.one_predictor else stage]

    def begin(self, images: ImageBatch) -> None:
        """Starts the forward pass of a batch, or of one chunk of a batch."""
        if self.call.outer and not is_traced():
            self._forget_interrupted()
        run = self.new_run(images)
        keys, windows = self.policy.reducer.image_keys(images), self.shape.layout.windows
        self.call.run, run.image_keys = run, keys if keys is None else keys.repeat_interleave(windows)

    def new_run(self, images: ImageBatch) -> TokenRun:
        """Returns the statistics of a forward pass at its beginning."""
        blocks = self.restored_blocks if self.call.restored_blocks is None else self.call.restored_blocks
        # In training every patch stays in its place, so no patch needs to be restored.
        return TokenRun(blocks, bool(blocks or self.call.tracked) and not self.samples_patches)

    def enter(self, stage: int | None, adds: bool, tokens: TokenBatch) -> Float[Tensor, "batch kept width"] | None:
        """Runs the pruning stage before a block, if there is one, and returns the tokens for the block.

        None means that the block keeps its own input. If `adds` is true, the reducer also observes the input tokens.
        """
        run = self._run
        present, run.present = run.present, None  # used only once, because the next block's input may not be restored
        tokens = tokens if present is None else present
        if adds:
            self.add_layer(tokens)
        return present if stage is None else self.decide(stage, tokens)

    def leave(self, block: int, tokens: TokenBatch) -> Float[Tensor, "batch all_tokens width"] | None:
        """Returns the tokens of all patches after a block of `restored_blocks`, or None after other blocks."""
        run, restored = self._run, None
        if run.stages and block in run.restored_blocks:
            prefix, run.present = self.shape.layout.prefix, tokens
            patches = tokens[:, prefix:]
            for stage in reversed(run.stages):
                patches = stage.restored(patches, block + 1)
            restored = torch.cat([tokens[:, :prefix], patches], dim=1)
        run.is_past_blocks = block + 1 == self.shape.depth
        # With restored tokens or a class token, `pooled` changes nothing, so it does not need the run.
        if run.is_past_blocks and (self.shape.layout.pooled == "class" or run.present is not None):
            self._end_outside()
        return restored

    def add_layer(self, observed: Float[Tensor, "batch *sizes"]) -> None:
        """Adds one layer's observed tensor to the statistic that the reducer computes over all layers."""
        self._run.statistic = self.policy.reducer.add_layer(self._run.statistic, observed)

    def add_capture(
        self, heads: tuple[int, ...], captured: CapturedAttention, decides: bool = True, windows: int = 1
    ) -> None:
        """Passes a layer's captured attention to the reducer. `heads` are the original indices of the layer's heads.

        A pruned layer stores its heads in another order, without removed heads. The reducer receives every head at its
        original index. Removed heads attend uniformly, as in the masked model. If `decides` is true, the capture is
        stored for the next stage. If `windows` is above 1, the layer attended to this many windows at once.
        """
        run, sizes = self._run, self.sizes()
        if windows > 1 and captured.keys is not None:
            captured = replace(captured, keys=captured.keys.unflatten(1, (windows, -1)).flatten(0, 1))
        if heads != tuple(range(self.shape.heads)):
            captured = replace(
                captured,
                attention=_at_all_heads(captured.attention, heads, self.shape.heads, sizes),
                class_attention=_at_all_heads(captured.class_attention, heads, self.shape.heads, sizes),
                value_norms=_at_all_heads(captured.value_norms, heads, self.shape.heads, sizes, attends=False),
            )
        if decides:  # full maps are large, so they are stored only if the next stage uses them
            run.captured = captured
        observed = getattr(captured, self.policy.reducer.every_layer, None)  # None for "tokens"
        if observed is not None:
            self.add_layer(observed)

    def decide(self, stage: int, tokens: TokenBatch) -> Tensor:
        """Runs the reducer at one stage, and returns the tokens that enter the next layer.

        Raises:
            InvalidInput: The block is called outside a forward pass of the model.
        """
        if self.call.run is None:
            raise self.called_alone("a block")
        prefix, run = self.shape.layout.prefix, self._run
        if run.patch_indices is None:
            run.patches = tokens.shape[1] - prefix
            run.patch_indices = counted(0, run.patches, tokens.device).expand(tokens.shape[0], -1)
        count = self.policy.counts(run.patches)[stage]
        if count >= run.patches:  # no token is pruned, so all tokens must stay exactly the same
            run.trail.append(run.patch_indices)
            return tokens
        return self.reduced(stage, count, tokens)

    def called_alone(self, part: str) -> InvalidInput:
        """Returns the error for a part of the model that was called outside a forward pass of the model."""
        return InvalidInput(
            f"{part} of a model with the token policy {self.policy} was called alone, and its tokens depend on the "
            "blocks before it: call the model, or a method of it that computes its patches."
        )

    def reduced(self, stage: int, count: int, tokens: TokenBatch) -> Tensor:
        """Returns the tokens after a stage that keeps `count` patches, and updates the run's statistics."""
        # Tokens are selected by samples (a learned reducer in training), by the C++ kernel, or by the reducer. Each
        # updates the run's statistics to the remaining tokens.
        prefix, run = self.shape.layout.prefix, self._run
        sizes, captured = run.sizes, run.captured
        assert run.patch_indices is not None
        if sizes is None:  # exported as a constant, so converting the file to half precision converts it, too
            sizes = tokens.new_ones(tokens.shape[1]).expand(tokens.shape[0], -1)
        state = TokenState(
            tokens, prefix, sizes, run.patch_indices, captured.class_attention, captured.attention, run.statistic,
            captured.keys, run.image_keys, captured.value_norms, stage, self.policy.layers[stage],
            self.shape.depth, unmasked=self.by == "compress" and not self.samples_patches, unsized=run.sizes is None,
            tracked=run.stages is not None,
        )  # fmt: skip
        if self.samples_patches:
            return self._draw(stage, state)
        # The merging kernel always removes tokens, so it cannot serve a mask, which keeps every shape.
        if self.by == "compress" and can_merge(tokens, run.patch_indices.shape[1], count):
            merged = self.policy.reducer.native_merge(state, count)
            if merged is not None:
                tokens, run.sizes, run.patch_indices, destinations = merged
                if run.stages is not None:
                    run.stages.append(RestorableStage(state.layer, state.patches, tokens[:, prefix:], destinations))
                run.trail.append(run.patch_indices)
                return tokens
        return self._applied(state, self.policy.reducer.reduce(state, count, self.predictor(stage)))

    def _applied(self, state: TokenState, reduction: Reduction) -> Tensor:
        """Returns the tokens that remain after a reduction, and updates the run's statistics."""
        run = self._run
        if self.by == "compress":
            reduced, positions = compressed_state(state, reduction), None
        else:
            reduced, positions = masked_state(state, reduction)
        run.sizes, run.patch_indices = reduced.sizes, reduced.patch_indices
        run.statistic = reduced.statistic
        if run.stages is not None:
            parts = [reduction.tokens] if reduction.extra is None else [reduction.tokens, reduction.extra]
            destinations = reduction.destinations
            if destinations is None:  # a selecting reducer, where kept patches represent themselves and others get -1
                destinations = destinations_of(reduction.kept, torch.full_like(state.patch_indices, -1))
            prunes = reduction.destinations is None
            remaining = torch.cat(parts, dim=1)
            run.stages.append(RestorableStage(state.layer, state.patches, remaining, destinations, prunes, positions))
        remaining = reduced.patch_indices
        # A masked model has the same trail as the smaller model, so the trail lists only the remaining patches.
        if positions is not None:
            # The sort is stable, so the remaining patches keep their order.
            present_mask = (reduced.sizes[:, state.prefix :] > 0).to(torch.int8)
            remaining = remaining.gather(1, stable_order(present_mask)[:, : positions.shape[1]])
        run.trail.append(remaining)
        return reduced.tokens

    def _draw(self, stage: int, state: TokenState) -> Tensor:
        """Samples which patches are kept in training. Every token keeps its index, and gets size 1 or 0."""
        run, prefix = self._run, state.prefix
        sampled = self.policy.reducer.sample(state, self.predictor(stage))
        run.sampled[stage] = sampled.keep
        sizes = sampled.keep
        # In training the number of tokens is fixed, so a fused token overwrites a pruned patch.
        if sampled.added is not None:
            sizes = sizes.scatter(1, sampled.added, 1.0)
            run.patch_indices, run.statistic = replaced_state(state, sampled.added)
        run.sizes = torch.cat([state.sizes[:, :prefix], sizes], dim=1)
        return torch.cat([state.tokens[:, :prefix], sampled.patches], dim=1)

    def pooled(self, tokens: TokenBatch) -> Tensor:
        """Changes the tokens before pooling, so that pruned tokens do not influence the result.

        For mean pooling, patches get weights. Pruned patches have weight 0, and merged patches may count several times.
        For max pooling, the first remaining patch replaces pruned patches, which does not change the maximum.
        """
        run = self._run
        if run.is_past_blocks:  # false if a library method calls the norm after an earlier block
            self._end_outside()
        # Restored tokens stand for all patches, so all of them count.
        if run.sizes is None or run.present is not None:
            return tokens
        prefix = self.shape.layout.prefix
        patches, sizes = tokens[:, prefix:], run.sizes[:, prefix:]
        if self.shape.layout.pooled == "mean":
            # The module after the norm divides by the number of tokens, so the weights must sum to this number. With a
            # proportional reducer, a merged token counts as often as it represents patches, like in attention.
            counts = sizes if self.policy.reducer.proportional or self.samples_patches else (sizes > 0).to(sizes.dtype)
            patches = patches * (counts * (counts.shape[1] / counts.sum(1, keepdim=True)))[..., None]
        else:
            remains = sizes > 0
            # argmax refuses booleans.
            first = remains.to(torch.uint8).argmax(1)[:, None, None].expand(-1, 1, patches.shape[-1])
            patches = torch.where(remains[..., None], patches, patches.gather(1, first))
        return torch.cat([tokens[:, :prefix], patches], dim=1)

    def normalized(self, norm: Callable[[Tensor], Tensor]) -> None:
        """Applies the norm to the remaining tokens after the last block, if the block returned restored patches."""
        run = self._run
        if run.is_past_blocks and run.present is not None:
            run.pooled = norm(run.present)

    def attended(self, tokens: TokenBatch) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens to which attention pooling attends, and the logarithms of their sizes.

        Only the remaining tokens are returned, even if all patches were restored for other modules. The logarithms are
        None if no token was pruned, or if all sizes count as 1.
        """
        run = self._run
        if run.is_past_blocks:
            self._end_outside()
        if run.sizes is None:
            return tokens, None
        # The pooling may skip the tokens before the patches.
        present = run.sizes.shape[1] if run.pooled is None else self.shape.layout.prefix + run.patches
        skipped = present - tokens.shape[1]
        tokens = tokens if run.pooled is None else run.pooled[:, skipped:]
        # Sampled sizes of 0 need a gradient, which log(0) lacks.
        scores = (run.sizes + TINY).log() if self.samples_patches else self.log_sizes()
        return tokens, None if scores is None else scores[:, skipped:]


def reduction_of(model: nn.Module) -> TokenReduction | None:
    """Returns a model's token reduction, or None if it has none."""
    # In another library's model, an attribute `tokens` may be something else.
    found = (model._modules.get(name) for name in (TOKENS, "tokens"))
    return next((reduction for reduction in found if isinstance(reduction, TokenReduction)), None)


def require_all_tokens(model: nn.Module, verb: str) -> None:
    """Raises NotSupported for a model that prunes or merges tokens. `verb` names the operation in the message."""
    reduction = reduction_of(model)
    if reduction is not None:
        raise NotSupported(
            f"this model prunes or merges tokens ({reduction.policy}), so its layers have different tokens: "
            f"{verb} the original, and apply the token policy last."
        )


def _at_all_heads(
    values: Tensor | None, heads: tuple[int, ...], count: int, sizes: Tensor | None, attends: bool = True
) -> Tensor | None:
    """Expands the values of the heads in `heads` to all `count` original heads.

    The other heads get uniform attention over the keys, or zero if `attends` is false.
    """
    if values is None:
        return None
    statistic = values.new_zeros(values.shape[0], count, *values.shape[2:])
    if attends:
        # If all scores are zero, keys get weights in proportion to their sizes, in class attention and in full maps.
        weights = values.new_ones(values.shape[0], values.shape[-1]) if sizes is None else sizes.to(values.dtype)
        shares = weights / weights.sum(-1, keepdim=True)
        statistic = statistic + shares.view(values.shape[0], *(1,) * (values.ndim - 2), -1)
    # Heads are set one by one. An index list would be copied to the device, a wait that a CUDA graph cannot record.
    for position, head in enumerate(heads):
        statistic[:, head] = values[:, position]
    return statistic


def compressed_state(state: TokenState, reduction: Reduction) -> TokenState:
    """Returns the state after a stage that removes tokens, with the remaining tokens, sizes, indices and statistics."""
    kept, extra, prefix = reduction.kept, reduction.extra, state.prefix
    # Before the first stage, the indices of patches equal the positions of their tokens.
    indices = kept if state.unsized else state.patch_indices.gather(1, kept)
    if extra is not None:
        indices = torch.cat([indices, indices.new_full((indices.shape[0], extra.shape[1]), -1)], dim=1)
    # Later stages use the statistic, so its rows are selected like the tokens, including the prefix. New tokens have no
    # past statistic, and their patch index is -1.
    statistic = state.statistic
    if statistic is not None:
        first = torch.arange(prefix, device=kept.device).expand(kept.shape[0], -1)
        statistic = statistic.at(torch.cat([first, prefix + kept], dim=1), 0 if extra is None else extra.shape[1])
    if reduction.whole is not None:
        tokens, sizes = reduction.whole
    else:
        parts = [state.tokens[:, :prefix], reduction.tokens, *([] if extra is None else [extra])]
        tokens = torch.cat(parts, dim=1)
        sizes = torch.cat([state.sizes[:, :prefix], remaining_sizes(state, reduction)], dim=1)
    return state.after(tokens=tokens, sizes=sizes, patch_indices=indices, statistic=statistic)


def masked_state(state: TokenState, reduction: Reduction) -> tuple[TokenState, Int[Tensor, "batch remaining"]]:
    """Returns the state after a stage that masks tokens, and the positions of the remaining tokens among the patches.

    Kept tokens stay at their indices, and extra tokens replace pruned patches. All other patches get size 0.
    """
    kept, extra, indices, statistic = reduction.kept, reduction.extra, state.patch_indices, state.statistic
    targets, values = kept, reduction.tokens
    if extra is not None:
        # Extra tokens replace the first patches that this stage prunes. The mask is 1 for patches that are pruned now.
        pruned_mask = state.present_mask.scatter(1, kept, 0.0)
        free = stable_order(pruned_mask)[:, : extra.shape[1]]
        targets, values = torch.cat([kept, free], dim=1), torch.cat([values, extra], dim=1)
        indices, statistic = replaced_state(state, free)
    # The patches are copied. Training needs the old tokens for gradients, and restoration needs those before the stage.
    patches = state.patches.scatter(1, targets[..., None].expand_as(values), values)
    sizes = torch.zeros_like(state.sizes[:, state.prefix :]).scatter(1, targets, remaining_sizes(state, reduction))
    tokens = torch.cat([state.tokens[:, : state.prefix], patches], dim=1)
    sizes = torch.cat([state.sizes[:, : state.prefix], sizes], dim=1)
    return state.after(tokens=tokens, sizes=sizes, patch_indices=indices, statistic=statistic), targets


def replaced_state(state: TokenState, added: Int[Tensor, "batch added"]) -> tuple[Tensor, LayerStatistic | None]:
    """Returns the patch indices and the statistic after new tokens have replaced the patches at `added`."""
    statistic = None if state.statistic is None else state.statistic.without(state.prefix + added)
    return state.patch_indices.scatter(1, added, -1), statistic


def remaining_sizes(state: TokenState, reduction: Reduction) -> Tensor:
    if reduction.sizes is not None:
        return reduction.sizes
    sizes = state.sizes[:, state.prefix :].gather(1, reduction.kept)
    return sizes if reduction.extra is None else torch.cat([sizes, torch.ones_like(reduction.extra[..., 0])], dim=1)
