"""The interface of token reducers, and the reducers that keep the patches with the highest attention.

The interface consists of the tokens of a batch with their statistics, and the result of a stage.
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
    """A statistic over all layers so far, for every token or every pair of tokens (`Reducer.add_layer`)."""

    @abstractmethod
    def at(self, kept: Int[Tensor, "batch kept"], num_new: int = 0) -> "LayerStatistic":
        """Returns the statistic of the tokens at the indices `kept`, followed by `num_new` tokens without a past."""

    @abstractmethod
    def without(self, indices: Int[Tensor, "batch removed"]) -> "LayerStatistic":
        """Returns the statistic without the past of the tokens at `indices`, because new tokens overwrote them."""


@dataclass(frozen=True)
class TokenState:
    """The input of a reducer at a stage. The first `prefix` tokens are not patches and are never pruned.

    `sizes`: the number of image patches that every token represents. A masked token has 0, an ordinary one 1, and a
    merged one more. `class_attention`: the attention from the class token to every token in the previous layer, by
    head. `attention`: the previous layer's whole map. `keys`: its keys averaged over the heads. `value_norms`: the
    norms of its values, by head. `statistic`: a statistic over all layers so far (`Reducer.add_layer`).
    `patch_indices`: the index of every patch token in the image, or -1 for a token that an earlier stage added.
    `image_keys`: the result of `Reducer.image_keys`. Fields that the reducer does not need are None. `stage` counts
    from 0. The stage runs before layer number `layer` (counted from 1) of `depth` layers.
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
    """Whether no token is masked. Then sums need no mask."""
    unsized: bool = False
    """Whether every token has size 1 and is either a patch of the image or a prefix token."""
    tracked: bool = False
    """Whether a reducer that merges or fuses patches must return their destinations."""

    @property
    def patches(self) -> Float[Tensor, "batch patches width"]:
        """The tokens that may be pruned."""
        return self.tokens[:, self.prefix :]

    @property
    def num_present(self) -> int:
        """The number of remaining patches of every image. It is a constant if no token is masked."""
        # A policy keeps the same number of patches in every image, so counting the first image's patches is enough.
        return self.patches.shape[1] if self.unmasked else int(self.present_mask[0].sum())

    @property
    def present_mask(self) -> Float[Tensor, "batch patches"]:
        """1 for every remaining patch, 0 for a pruned one."""
        if self.unmasked:  # a constant in a file
            return self.tokens.new_ones(self.patches.shape[1]).expand(self.tokens.shape[0], -1)
        return (self.sizes[:, self.prefix :] > 0).to(self.tokens.dtype)

    def after(self, **changes: Any) -> "TokenState":
        """Returns the state after a stage, without the previous layer's captures of the tokens before the stage."""
        return replace(self, class_attention=None, attention=None, keys=None, value_norms=None, **changes)


@dataclass(frozen=True)
class TokenLayout:
    """`prefix` tokens (class, distillation, registers) precede the `patches` and are never pruned.

    `class_token` tells whether the first of them is a class token. `pooled` is the input of the classifier: "class" for
    prefix tokens only, "mean" for the mean of the patches, or "max" for the maximum over the patch logits. "mean" and
    "max" may include prefix tokens. If an image is divided into `windows`, all counts are per window, and the layers
    with the indices `joined` attend to all windows of an image.
    """

    prefix: int
    patches: int
    class_token: bool
    pooled: str
    windows: int = 1
    joined: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.prefix + self.patches


@dataclass(frozen=True)
class Reduction:
    """The result of a stage: the patches at `kept` (ascending), with these values, followed by `extra` tokens.

    `sizes` are the new sizes of the kept and the extra tokens. With None, kept tokens keep their sizes, and extra
    tokens get size 1. `destinations` is needed if the state is `tracked`. It has, for each patch, the index of the
    token that represents it, among the kept and then the extra tokens. With None, a kept patch represents itself, and
    no other patch is represented. If the reducer has all tokens in one tensor, `whole` contains the tokens and their
    sizes, including the prefix tokens.
    """

    kept: Int[Tensor, "batch kept"]
    tokens: Float[Tensor, "batch kept width"]
    extra: Float[Tensor, "batch extra width"] | None = None
    sizes: Float[Tensor, "batch left"] | None = None
    destinations: Int[Tensor, "batch patches"] | None = None
    whole: tuple[Float[Tensor, "batch tokens width"], Float[Tensor, "batch tokens"]] | None = None


@dataclass(frozen=True)
class SampledTokens:
    """The result of a stage in training.

    `keep` is the sampled mask, 1 for a kept patch and 0 for a pruned one. `added` are the indices of pruned patches
    that new tokens overwrote.
    """

    keep: PerPatch
    patches: Float[Tensor, "batch patches width"]
    added: Int[Tensor, "batch added"] | None = None


@dataclass(frozen=True)
class Shape:
    """The model properties that a reducer needs.

    `heads` is the number of heads of the original model. The reducer receives all of them in order, even if some were
    removed. `directions` is the width of its keys, used only for costs. `depth` is the number of layers.
    """

    width: int
    heads: int
    layout: TokenLayout
    directions: int = 0
    depth: int = 2


class Reducer(ABC):
    """Selects or merges tokens at every stage of a policy. A reducer is a frozen dataclass of its settings.

    `needs` lists what the reducer takes from the layer before a stage: "class_attention", "attention", "keys",
    "value_norms". `every_layer` is what it takes from every layer before its last stage: "class_attention", "attention"
    or "tokens" (the output of the layer). `add_layer` turns these quantities into a statistic.

    A `proportional` reducer changes the sizes of tokens. Later attention then weights a token by its size, by adding
    the logarithm of the size to its scores. A stage appends `extra` tokens to the kept ones. A `learned` reducer has a
    predictor at every stage or, with `one_predictor`, one predictor for all stages. `untrained_reason` is not None if a
    reducer's selection is meaningful only after training with it.
    """

    name: ClassVar[str]  # in texts, if it is not the name of the class in snake case
    proportional: ClassVar[bool] = False
    extra: ClassVar[int] = 0
    # These four may depend on the settings. Such a reducer sets them in __post_init__.
    needs: tuple[str, ...] = ()
    every_layer: str = ""
    learned: bool = False
    one_predictor: bool = False

    def __post_init__(self):
        require_fields(self)

    @property
    def untrained_reason(self) -> str | None:
        """Why the selection has no meaning in a model that was not trained with it, or None if it has a meaning."""
        return "its predictors select at random until they are trained" if self.learned else None

    @abstractmethod
    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Reduces every image to `count` patches."""

    def native_merge(self, state: TokenState, count: int) -> Merged | None:
        """Merges to `count` patches in one round by the C++ kernel, or returns None if the kernel cannot do so."""
        return None

    def predictor(self, shape: Shape) -> nn.Module:
        """Returns a new predictor for one stage."""
        return nn.Module()  # without parameters: every stage has a predictor, even if the reducer learns nothing

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """Returns the MACs of all matrix products in a stage that keeps `count` of `patches` patches.

        Norms are not counted, as elsewhere in `costs`. The predictor's MACs are derived from its modules, which are
        assumed to run once per patch. Sums and page rank over maps are not counted, either.
        """
        return 0

    def add_layer(self, before: Any, observed: Float[Tensor, "batch *sizes"]) -> LayerStatistic:
        """Adds one layer's `every_layer` quantity to the statistic `before`, which is None at the first layer.

        Raises:
            NotImplementedError: The reducer does not have such a statistic.
        """
        raise NotImplementedError

    def image_keys(self, images: Float[Tensor, "batch channels height width"]) -> Int[Tensor, "batch"] | None:
        """Returns a number for every image that the selection depends on, or None if there is no such number."""
        return None

    def sample(self, state: TokenState, predictor: nn.Module) -> SampledTokens:
        """Samples, in a training step, which patches a learned reducer keeps.

        If the sample equals the selection at inference, the tokens equal the result of `reduce`. Gradients flow through
        `keep`.

        Raises:
            NotSupported: The reducer learns nothing.
        """
        raise NotSupported(f"{self} has no scores that can be trained.")

    def __str__(self) -> str:
        knobs = spelled_knobs(self, Reducer)
        return text_name(type(self)) + (f"({knobs})" if knobs else "")


class Selecting(Reducer):
    """A reducer that scores the patches and keeps the best ones."""

    @abstractmethod
    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns a score for every patch. Only the order of scores within an image affects the selection."""

    def weights(self, relevance: PerPatch) -> PerPatch:
        """Converts relevance into nonnegative weights for fusing pruned patches."""
        return relevance

    def reduce(self, state: TokenState, count: int, predictor: nn.Module) -> Reduction:
        """Keeps the patches with the highest relevance, in their order."""
        return reduced_to_best(state, self.relevance(state, predictor), count)


@kept
def counted(first: int, stop: int, device: torch.device) -> Int[Tensor, "count"]:
    """Returns the integers from `first` up to, but not including, `stop`."""
    return torch.arange(first, stop, device=device)


def gathered_rows(
    table: Float[Tensor, "batch rows features"], indices: Int[Tensor, "batch chosen"]
) -> Float[Tensor, "batch chosen features"]:
    """Returns the rows at `indices` for every image."""
    if not (table.device.type == "cpu" or is_traced()):  # one kernel instead of four
        return table.gather(1, indices[..., None].expand(-1, -1, table.shape[2]))
    # index_select copies whole rows, but gather copies element by element.
    image = torch.arange(indices.shape[0], device=indices.device)[:, None]
    rows = table.flatten(0, 1).index_select(0, (image * table.shape[1] + indices).flatten())
    return rows.unflatten(0, indices.shape)


def stable_order(
    values: Float[Tensor, "batch values"] | Int[Tensor, "batch values"], descending: bool = True
) -> Int[Tensor, "batch values"]:
    """Returns the indices that sort every row. Of equal values, the value with the lower index comes first."""
    # ONNX has no stable sort, but its TopK over all values sorts stably.
    if torch.onnx.is_in_onnx_export():
        return values.topk(values.shape[1], dim=1, largest=descending).indices
    return values.argsort(dim=1, descending=descending, stable=True)


def first_best(values: Float[Tensor, "batch values"], count: int) -> Int[Tensor, "batch best"]:
    """Returns the indices of each row's `count` largest values, or of all values if there are fewer, in any order.

    Among equal values it chooses the first ones, except in a graph for a CPU, where it may choose any.
    """
    # On CUDA and in ONNX, topk returns the first of equal values. On CUDA, topk is one kernel. A stable sort is four
    # kernels and needs ten seconds to compile. OpenVINO's topk takes a tenth of the time of a sort.
    if values.device.type in ("cuda", "meta") or is_traced():
        return values.topk(min(count, values.shape[1]), dim=1, sorted=False).indices
    return stable_order(values)[:, :count]


def best(relevance: PerPatch, present_mask: PerPatch | None, count: int) -> Int[Tensor, "batch kept"]:
    """Returns the indices of the `count` most relevant patches that are present (no mask: all are), in ascending order.

    Among equal patches it takes the first ones, like `first_best`.
    """
    if present_mask is not None:
        relevance = relevance.masked_fill(present_mask == 0, float("-inf"))
    return first_best(relevance, count).sort(dim=1).values


def destinations_of(kept: Int[Tensor, "batch kept"], others: Int[Tensor, "batch patches"]) -> Tensor:
    """Returns the destinations of all patches. A kept patch has its index among the kept, the rest are in `others`."""
    return others.scatter(1, kept, torch.arange(kept.shape[1], device=kept.device).expand_as(kept))


def reduced_to_best(state: TokenState, relevance: PerPatch, count: int) -> Reduction:
    """Keeps the `count` most relevant patches, in their order."""
    kept = best(relevance, None if state.unmasked else state.present_mask, count)
    return Reduction(kept, gathered_rows(state.patches, kept))


@dataclass(frozen=True)
class ClassAttention(Selecting):
    """Keeps the patches with the highest attention from the class token in the previous layer, averaged over heads."""

    needs = ("class_attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        assert state.class_attention is not None
        return state.class_attention[:, :, state.prefix :].mean(1)


@dataclass(frozen=True)
class AttentionReceived(Selecting):
    """Keeps the patches that get the most attention from all tokens of the previous layer. Needs no class token."""

    needs = ("attention",)

    def relevance(self, state: TokenState, predictor: nn.Module) -> PerPatch:
        """Returns the attention that each patch receives, summed over the remaining tokens and averaged over heads."""
        assert state.attention is not None
        # Masked tokens receive no attention, but their own rows of the map still sum to 1 and must not be counted.
        attention = state.attention
        if not state.unmasked:
            attention = attention * (state.sizes > 0).to(attention.dtype)[:, None, :, None]
        received = attention.sum(2)  # over the queries: [batch, heads, tokens]
        return received[:, :, state.prefix :].mean(1)
