"""The interface of token reducers, and two reducers that keep the patches with the highest attention.

At each stage, a reducer gets a `TokenState` and returns a `Reduction`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.support.arguments import require_fields
from attnrx.support.errors import NotSupported
from attnrx.support.modules import is_traced, kept
from attnrx.support.registry import text_name
from attnrx.support.shapes import Float, Int, Tensor
from attnrx.support.text_parsing import spelled_knobs
from attnrx.vit.kernels.native_attention import Merged

PerPatch = Float[Tensor, "batch patches"]


class LayerStatistic(ABC):
    """A statistic per token or per pair of tokens, accumulated over all layers so far (`Reducer.add_layer`)."""

    @abstractmethod
    def at(self, kept: Int[Tensor, "batch kept"], num_new: int = 0) -> "LayerStatistic":
        """Returns the statistic for the tokens at the indices `kept`, followed by `num_new` new tokens."""

    @abstractmethod
    def without(self, indices: Int[Tensor, "batch removed"]) -> "LayerStatistic":
        """Returns the statistic with the entries at `indices` reset, because new tokens overwrote these tokens."""


@dataclass(frozen=True)
class TokenState:
    """The input of a reducer at a stage. Statistics that the reducer does not need are None.

    Attributes:
        tokens: All tokens that enter the stage, including the prefix tokens.
        prefix: The number of tokens before the patches (e.g. the class token), which are never pruned.
        sizes: The number of image patches that each token represents: 0 for a masked token, 1 for an ordinary token,
            and more for a merged token.
        patch_indices: The index of each patch token in the image, or -1 for a token that an earlier stage added.
        class_attention: The class token's attention to every token in the previous layer, by head.
        attention: The previous layer's full attention maps.
        statistic: A statistic over all layers so far (`Reducer.add_layer`).
        keys: The previous layer's keys, averaged over the heads.
        image_keys: An integer per image on which the selection may depend (`Reducer.image_keys`).
        value_norms: The norms of the previous layer's values, by head.
        stage: The number of the stage, counted from 0.
        layer: The number of the layer before which the stage runs, counted from 1.
        depth: The number of layers in the model.
    """

    tokens: Float[Tensor, "batch tokens width"]
    prefix: int
    sizes: Float[Tensor, "batch tokens"]
    patch_indices: Int[Tensor, "batch patches"]
    class_attention: Float[Tensor, "batch heads tokens"] | None = None
    attention: Float[Tensor, "batch heads tokens tokens"] | None = None
    statistic: LayerStatistic | None = None
    keys: Float[Tensor, "batch tokens directions"] | None = None
    image_keys: Int[Tensor, "batch"] | None = None
    value_norms: Float[Tensor, "batch heads tokens"] | None = None
    stage: int = 0
    layer: int = 2
    depth: int = 2
    unmasked: bool = False
    """Whether no token is masked, so that reducers need no mask in their sums."""
    unsized: bool = False
    """Whether all tokens have size 1 and no stage has added a token."""
    tracked: bool = False
    """Whether a reducer that merges or fuses patches must return `Reduction.destinations`."""

    @property
    def patches(self) -> Float[Tensor, "batch patches width"]:
        """The tokens after the prefix, which may be pruned."""
        return self.tokens[:, self.prefix :]

    @property
    def num_present(self) -> int:
        """The number of patches per image that are not masked."""
        # A policy keeps equally many patches in every image, so only the first image's patches are counted.
        return self.patches.shape[1] if self.unmasked else int(self.present_mask[0].sum())

    @property
    def present_mask(self) -> Float[Tensor, "batch patches"]:
        """A mask that is 1 for every remaining patch and 0 for every pruned patch."""
        if self.unmasked:  # exported files then contain a constant
            return self.tokens.new_ones(self.patches.shape[1]).expand(self.tokens.shape[0], -1)
        return (self.sizes[:, self.prefix :] > 0).to(self.tokens.dtype)

    def after(self, **changes: Any) -> "TokenState":
        """Returns the state after a stage, with these `changes`.

        The previous layer's statistics are set to None, because they describe the tokens before the stage.
        """
        return replace(self, class_attention=None, attention=None, keys=None, value_norms=None, **changes)


@dataclass(frozen=True)
class TokenLayout:
    """The number and order of a model's tokens, and how the classifier pools them.

    Attributes:
        prefix: The number of tokens before the patches (class, distillation, registers), which are never pruned.
        patches: The number of patches.
        class_token: Whether the first prefix token is a class token.
        pooled: The input of the classifier: "class" for prefix tokens only, "mean" for the mean of the patches, or
            "max" for the maximum over the patch logits. "mean" and "max" may include prefix tokens.
        windows: The number of windows per image. If it is above 1, `prefix` and `patches` are counts per window.
        joined: The indices of the layers that attend to all windows of an image.
        in_layers: Whether the blocks take grids of tokens, as in SAM. Patches are then merged inside every attention
            and every MLP, and come back after it, so every block returns all patches.
    """

    prefix: int
    patches: int
    class_token: bool
    pooled: str
    windows: int = 1
    joined: tuple[int, ...] = ()
    in_layers: bool = False

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches


@dataclass(frozen=True)
class Reduction:
    """The result of a stage: the tokens that remain, followed by tokens that the stage adds.

    Attributes:
        kept: The indices of the remaining patches in ascending order.
        tokens: The remaining patches, which merging may have changed.
        extra: The tokens that the stage adds after the remaining patches.
        sizes: The new sizes of the remaining and the added tokens. If `sizes` is None, remaining patches keep their
            sizes and added tokens get size 1.
        destinations: For each patch, the index of the token that represents it, or -1 if no token does. Remaining
            patches are counted before added tokens. Required if the state is `tracked` and patches were merged or
            fused. If `destinations` is None, each kept patch represents only itself.
        whole: The remaining tokens and their sizes, both including the prefix tokens. None if the reducer returns only
            patches.
    """

    kept: Int[Tensor, "batch kept"]
    tokens: Float[Tensor, "batch kept width"]
    extra: Float[Tensor, "batch extra width"] | None = None
    sizes: Float[Tensor, "batch left"] | None = None
    destinations: Int[Tensor, "batch patches"] | None = None
    whole: tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens"]] | None = None


@dataclass(frozen=True)
class SampledTokens:
    """The result of a stage in a training step, in which pruned patches are masked.

    `keep` is 1 for every patch that is kept and 0 for every pruned patch. New tokens overwrite the pruned patches at
    the indices `added`.
    """

    keep: PerPatch
    patches: Float[Tensor, "batch patches width"]
    added: Int[Tensor, "batch added"] | None = None


@dataclass(frozen=True)
class Shape:
    """The model properties that a reducer needs.

    `heads` is the number of heads in the original model. A reducer always gets statistics for this number of heads in
    their original order, even if heads were removed. `directions` is the width of the keys, which is used only to
    compute costs. `depth` is the number of layers.
    """

    width: int
    heads: int
    layout: TokenLayout
    directions: int = 0
    depth: int = 2


class Reducer(ABC):
    """Base class of token reducers, which prune or merge tokens at every stage of a policy.

    Implement a reducer as a frozen dataclass whose fields are its settings.

    Attributes:
        proportional: Whether the reducer changes the sizes of tokens. If so, later layers add the logarithm of each
            token's size to its attention scores, so that larger tokens get more weight.
        extra: How many tokens a stage appends to the kept patches.
        needs: What the reducer needs from the layer before a stage: any of "class_attention", "attention", "keys",
            "value_norms".
        every_layer: What the reducer needs from every layer before its last stage: "class_attention", "attention" or
            "tokens" (the layer's output). `add_layer` accumulates this quantity.
        learned: Whether the reducer has a trainable predictor at every stage.
        one_predictor: Whether all stages share one predictor.
    """

    name: ClassVar[str]  # the name in texts, if it is not the name of the class in snake case
    proportional: ClassVar[bool] = False
    extra: ClassVar[int] = 0
    # If one of the next four attributes depends on the settings, the reducer sets it in __post_init__.
    needs: tuple[str, ...] = ()
    every_layer: str = ""
    learned: bool = False
    one_predictor: bool = False

    def __post_init__(self):
        require_fields(self)

    @property
    def untrained_reason(self) -> str | None:
        """The reason why the selection is meaningless before training, or None if no training is needed."""
        return "its predictors select at random until they are trained" if self.learned else None

    @abstractmethod
    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Reduces every image to `count` patches, by pruning or merging."""

    def native_merge(self, state: TokenState, count: int) -> Merged | None:
        """Merges to `count` patches in one round with the C++ kernel, or returns None if the reducer has no kernel."""
        return None

    def predictor(self, shape: Shape) -> nn.Module:
        """Returns a new predictor for one stage, without parameters if the reducer does not learn."""
        return nn.Module()

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of a stage that keeps `count` of `patches` patches, counting only matrix products.

        As in all of attnrx's costs, norms and sums are not counted, nor is PageRank on attention maps. A predictor's
        modules are assumed to run once per patch.
        """
        return 0

    def add_layer(self, before: Any, observed: Float[Tensor, "batch *sizes"]) -> LayerStatistic:
        """Returns the statistic `before` (None at the first layer) after adding one layer's `every_layer` quantity.

        Raises:
            NotImplementedError: The reducer accumulates no statistic over layers.
        """
        raise NotImplementedError

    def image_keys(self, images: Float[Tensor, "batch channels height width"]) -> Int[Tensor, "batch"] | None:
        """Returns an integer per image on which the selection depends (e.g. a random seed), or None."""
        return None

    def sample(self, state: TokenState, predictor: nn.Module) -> SampledTokens:
        """Samples which patches a learned reducer keeps in a training step.

        Gradients flow through `keep`. If the sampled patches are also the patches that inference would select, the
        remaining tokens equal the result of `reduce`.

        Raises:
            NotSupported: The reducer has nothing to train.
        """
        raise NotSupported(f"{self} has no scores that can be trained.")

    def __str__(self) -> str:
        knobs = spelled_knobs(self, Reducer)
        return text_name(type(self)) + (f"({knobs})" if knobs else "")


class Selecting(Reducer):
    """Base class of reducers that score all patches and keep those with the highest scores."""

    @abstractmethod
    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns a score for every patch. Only the order of the scores within an image affects the selection."""

    def weights(self, relevance: PerPatch) -> PerPatch:
        """Converts relevance into nonnegative weights, for reducers that fuse pruned patches into a weighted mean."""
        return relevance

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the `count` patches with the highest relevance, in their original order."""
        return reduced_to_best(state, self.relevance(state, predictor), count)


@kept
def counted(first: int, stop: int, device: torch.device) -> Int[Tensor, "count"]:
    """Returns the integers from `first` up to but excluding `stop`. The tensor is cached."""
    return torch.arange(first, stop, device=device)


def gathered_rows(
    table: Float[Tensor, "batch rows features"], indices: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Returns the rows of each image's table at that image's `indices`."""
    if not (table.device.type == "cpu" or is_traced()):  # gather launches one kernel, and index_select needs four
        return table.gather(1, indices[..., None].expand(-1, -1, table.shape[2]))
    # On a CPU, index_select is faster, because it copies whole rows. gather copies element by element.
    image = torch.arange(indices.shape[0], device=indices.device)[:, None]
    rows = table.flatten(0, 1).index_select(0, (image * table.shape[1] + indices).flatten())
    return rows.unflatten(0, indices.shape)


def stable_order(
    values: Float[Tensor, "batch values"] | Int[Tensor, "batch values"], descending: bool = True
) -> Int[Tensor, "batch values"]:
    """Returns the indices that sort each row of `values` stably, so that equal values keep their order."""
    # ONNX has no stable sort, but its TopK over all values keeps the order of equal values.
    if torch.onnx.is_in_onnx_export():
        return values.topk(values.shape[1], dim=1, largest=descending).indices
    return values.argsort(dim=1, descending=descending, stable=True)


def first_best(values: Float[Tensor, "batch values"], count: int) -> Int[Tensor, "batch best"]:
    """Returns the indices of each row's `count` largest values (all indices if there are fewer values), in any order.

    Among equal values, the first ones are chosen. A graph that is traced for a CPU may choose any of them.
    """
    # On CUDA and in ONNX, topk chooses the first of equal values. On CUDA, topk is one kernel, but a stable sort
    # needs four kernels and ten seconds of compilation. In OpenVINO, topk takes a tenth of a sort's time.
    if values.device.type in ("cuda", "meta") or is_traced():
        return values.topk(min(count, values.shape[1]), dim=1, sorted=False).indices
    return stable_order(values)[:, :count]


def best(relevance: PerPatch, present_mask: PerPatch | None, count: int) -> Int[Tensor, "batch kept"]:
    """Returns the indices of the `count` most relevant patches, in ascending order.

    Only patches where `present_mask` is 1 are chosen. If it is None, all patches are present. Among patches of equal
    relevance, the first ones are chosen, with the same exception as in `first_best`.
    """
    if present_mask is not None:
        relevance = relevance.masked_fill(present_mask == 0, float("-inf"))
    return first_best(relevance, count).sort(dim=1).values


def destinations_of(kept: Int[Tensor, "batch kept"], others: Int[Tensor, "batch patches"]) -> Tensor:
    """Returns, for every patch, the index of the token that represents it, [batch, patches].

    For a kept patch, this is its position in `kept`. For all other patches, the indices come from `others`.
    """
    return others.scatter(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))


def reduced_to_best(state: TokenState, relevance: PerPatch, count: int) -> Reduction:
    """Returns the reduction that keeps the `count` most relevant patches, in their original order."""
    kept = best(relevance, None if state.unmasked else state.present_mask, count)
    return Reduction(kept, gathered_rows(state.patches, kept))


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches to which the class token pays the most attention in the previous layer, averaged over heads."""

    needs = ("class_attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        assert state.class_attention is not None
        return state.class_attention[:, :, state.prefix :].mean(1)


@dataclass(frozen=True)
class AttentionReceived(Selecting):
    """Keeps the patches that get the most attention from all tokens in the previous layer. It needs no class token."""

    needs = ("attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns each patch's received attention, summed over the remaining tokens and averaged over the heads."""
        assert state.attention is not None
        # Masked tokens receive no attention. But as queries they still pay attention, which must not be counted.
        attention = state.attention
        if not state.unmasked:
            attention = attention * (state.sizes > 0).to(attention.dtype)[:, None, :, None]
        received = attention.sum(2)  # summed over the queries: [batch, heads, tokens]
        return received[:, :, state.prefix :].mean(1)
