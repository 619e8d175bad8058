"""Parameters and multiply-accumulate operations (MACs) of a model and its parts, computed by formulas.

The numbers are exact and must agree with counted operations. They follow the convention of the SVDA paper (A.6).
Parameters include all trainable tensors. MACs include all matrix products in the patch embedding and the layers, and
one MAC per token for every strength. Biases, LayerNorm, row norms, softmax and GELU are not counted. The classifier's
MACs are reported separately. Every layer is counted for all tokens, although the last block of a model may compute only
the class token.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.modules import require_gradient_
from attnrx.support.shapes import ImageBatch
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import Shape, TokenPolicy

# torch 2.11 counts fused attention only on CUDA. Later versions register the same formula for the CPU, as here.
_aten = torch.ops.aten
flop_registry.setdefault(
    _aten._scaled_dot_product_flash_attention_for_cpu, flop_registry[_aten._scaled_dot_product_flash_attention]
)


@dataclass(frozen=True)
class PartCosts:
    """The number of trainable parameters in a part of a model, and its MACs for one image."""

    params: int = 0
    macs: int = 0

    def __add__(self, other: "PartCosts") -> "PartCosts":
        return PartCosts(self.params + other.params, self.macs + other.macs)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one transformer block, by part.

    Attributes:
        query_key: The query and key projections, and the products of queries with relative position vectors.
        scores: The products of queries with keys.
        diagonal: The multiplication of queries by strengths.
        fusion: The matrix that mixes the score maps that heads share.
        value_output: The value and output projections.
        read_out: The products of attention maps with values.
        mlp: The MLP.
        layer_norms: The parameters of the norms, and all other parameters of the block that belong to none of the parts
            above. Their MACs are not counted.
        directions: The number of score directions. Directions that heads share are counted once.
        spec: The spec of the attention layer.
        tokens: The number of tokens in the layer.
    """

    query_key: PartCosts
    scores: PartCosts
    diagonal: PartCosts
    fusion: PartCosts
    value_output: PartCosts
    read_out: PartCosts
    mlp: PartCosts
    layer_norms: PartCosts
    directions: int
    spec: AttentionSpec
    tokens: int

    @property
    def parts(self) -> dict[str, PartCosts]:
        """The costs of every part by its name. The parts add up to `total`."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, PartCosts)}

    @property
    def total(self) -> PartCosts:
        """The costs of the whole block."""
        return _sum(self.parts.values())

    def over(self, lengths: Sequence[int], mlp_tokens: int | None = None) -> "LayerCosts":
        """Returns the block's costs for one image if its tokens are divided into sequences with these `lengths`.

        Attention is computed within each sequence, e.g. within a window. The MLP processes the tokens of all sequences,
        or `mlp_tokens` tokens if `mlp_tokens` is not None.
        """
        once, squares = sum(lengths), sum(length * length for length in lengths)

        def repeated(name: str, part: PartCosts) -> PartCosts:
            of_pairs = name in ("scores", "fusion", "read_out")
            count = mlp_tokens if name == "mlp" and mlp_tokens is not None else once
            total = part.macs // self.tokens**2 * squares if of_pairs else part.macs // self.tokens * count
            return PartCosts(part.params, total)

        return replace(self, **{name: repeated(name, part) for name, part in self.parts.items()})


@dataclass(frozen=True, repr=False)
class ModelCosts(Displayed):
    """The costs of a whole model, by part.

    If a token reducer uses the class token's attention, the model computes this attention separately, because a fused
    kernel does not return it. These additional MACs are not counted.

    Attributes:
        patches: The patch embedding. In models not built from attnrx's own layers, its parameters include the learned
            tokens and positions.
        layers: The costs of each transformer block.
        classifier: The parameters of the classifier and its norm. If the Vision Transformer is part of a larger module,
            the parameters and MACs of the parts around it are included.
        classifier_macs: The MACs of the classifier. As in the SVDA paper, `macs` does not include them.
        embeddings: The learned tokens and positions, unless `patches` includes them. They have MACs only in timm's
            `relpos` models, where an MLP computes the pair bias once per call. These MACs assume a call with one image.
        predictors: The modules of a learned token reducer, which select tokens between layers.
    """

    patches: PartCosts
    layers: tuple[LayerCosts, ...]
    classifier: PartCosts
    classifier_macs: int
    embeddings: PartCosts = PartCosts()
    predictors: PartCosts = PartCosts()

    @property
    def parts(self) -> dict[str, PartCosts]:
        """The costs of every part by its name, summed over the layers. The parts add up to `total`."""
        names = self.layers[0].parts if self.layers else {}
        return {
            "patches": self.patches,
            "embeddings": self.embeddings,
            **{name: _sum(layer.parts[name] for layer in self.layers) for name in names},
            "predictors": self.predictors,
            "classifier": self.classifier,
        }

    def called(
        self, lengths: Sequence[Sequence[int]], patches: int, heads: int, mlp_tokens: Sequence[int] | None = None
    ) -> "ModelCosts":
        """Returns the costs per image in a larger module, which may call parts of the model several times per image.

        Args:
            lengths: For each layer, the lengths of the sequences that it processes (see `LayerCosts.over`).
            patches: How many times the patch embedding and the predictors run.
            heads: How many times the classifier runs.
            mlp_tokens: For each layer, the number of tokens that its MLP processes. None means all tokens.
        """

        def often(part: PartCosts) -> PartCosts:
            return PartCosts(part.params, patches * part.macs)

        counts = mlp_tokens or (None,) * len(lengths)
        called = zip(self.layers, lengths, counts, strict=True)
        layers = tuple(layer.over(each, count) for layer, each, count in called)
        classifier_macs = heads * self.classifier_macs
        return replace(
            self, patches=often(self.patches), layers=layers, predictors=often(self.predictors),
            classifier_macs=classifier_macs,
        )  # fmt: skip

    @property
    def total(self) -> PartCosts:
        """The costs of the whole model, without the classifier's MACs."""
        return _sum(self.parts.values())

    @property
    def params(self) -> int:
        """The number of trainable parameters in the whole model."""
        return self.total.params

    @property
    def macs(self) -> int:
        """The MACs for one image by the SVDA paper's convention, without the classifier."""
        return self.total.macs

    @property
    def product_macs(self) -> int:
        """The MACs of all matrix products and convolutions, including the classifier, as a FLOP counter counts them."""
        # FLOP counters do not count elementwise products, so the MACs of strengths are subtracted.
        return self.macs + self.classifier_macs - sum(layer.diagonal.macs for layer in self.layers)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The number of tokens in each layer."""
        return tuple(layer.tokens for layer in self.layers)

    @property
    def directions(self) -> int:
        """The total number of score directions over all layers and heads."""
        return sum(layer.directions for layer in self.layers)

    def to_record(self) -> dict[str, Any]:
        """Returns the totals and the costs of every part as a dict for JSON."""
        return {
            "params": self.params, "macs": self.macs, "classifier_macs": self.classifier_macs,
            "predictor_macs": self.predictors.macs, "tokens": list(self.tokens), "directions": self.directions,
            "parts": {name: {"params": part.params, "macs": part.macs} for name, part in self.parts.items()},
        }  # fmt: skip


def _sum(parts: Iterable[PartCosts]) -> PartCosts:
    return sum(parts, start=PartCosts())


def layer_costs(
    spec: AttentionSpec, tokens: int, mlp: PartCosts, layer_norms: PartCosts, merges: bool = False
) -> LayerCosts:
    """Returns the costs of a block with this attention layer, MLP and norms.

    MACs are counted without padding. A backend that pads heads to a common rank computes more MACs. `merges` tells
    whether the layer computes on some of the tokens in its window.
    """
    # `rows` counts projected rows, and `rank` counts directions over all heads. They differ for layers with original
    # norms, which project more rows than they use, and for shared directions, which have one row for all heads.
    rows, rank, features = sum(spec.rows), sum(spec.ranks), sum(spec.value_dims)
    # A head of rank 0 returns the mean of its values, so it needs no products between tokens.
    attending = sum(value_dim for head_rank, value_dim in zip(spec.ranks, spec.value_dims, strict=True) if head_rank)
    strengths = rank if spec.traits.has_strengths else 0
    # A matrix [heads, blocks] mixes the score maps for every pair of tokens.
    mixed = len(spec.heads) * len(spec.blocks) if spec.blocks is not None else 0
    query, key = (linear_costs(spec.width, rows, tokens, bias=spec.has_bias(side)) for side in ("query", "key"))
    value = linear_costs(spec.width, features, tokens, bias=spec.has_bias("value"))
    output = linear_costs(sum(spec.value_dims), spec.width, tokens, bias=spec.has_bias("output"))
    # Every query is multiplied by one vector for every row and every column of the window, or for every distance if
    # tokens are missing. In some models all heads share these vectors, so their parameters are not counted here but
    # with the rest of the block.
    distances = PartCosts(0, tokens * (spec.num_distances if merges else sum(spec.window or ())) * rank)
    return LayerCosts(
        query_key=query + key + distances,
        # Each head multiplies its directions, even shared ones. Score maps of blocks are computed once for all heads.
        scores=PartCosts(0, tokens * tokens * (rows if spec.traits.mixes_blocks else rank)),
        diagonal=PartCosts(strengths, tokens * strengths),
        fusion=PartCosts(mixed, tokens * tokens * mixed),
        value_output=value + output,
        read_out=PartCosts(0, tokens * tokens * attending),
        mlp=mlp,
        layer_norms=layer_norms,
        directions=rows if spec.traits.shares_directions else rank,
        spec=spec,
        tokens=tokens,
    )


def linear_costs(inputs: int, outputs: int, tokens: int, bias: bool = True) -> PartCosts:
    """Returns the costs of a linear layer that is applied to every token."""
    return PartCosts((inputs + bias) * outputs, tokens * inputs * outputs)


@dataclass(frozen=True)
class TokenCosts:
    """The number of tokens in each layer under a token policy, and the costs of the policy's predictors.

    If tokens are merged inside layers (`TokenLayout.in_layers`), `tokens` contains the numbers for a sequence of all
    patches. `policy` and `shape` then tell what remains of a window.
    """

    tokens: tuple[int, ...]
    predictors: PartCosts = PartCosts()
    policy: TokenPolicy | None = None
    shape: Shape | None = None

    def in_layers(
        self, lengths: Sequence[Sequence[int]], mlp_tokens: int
    ) -> tuple[list[list[int]], list[int], PartCosts]:
        """Returns what remains if every layer merges the tokens of its own sequences.

        Args:
            lengths: For each layer, the lengths of its sequences, e.g. of its windows.
            mlp_tokens: The number of tokens that an MLP processes if nothing is merged.

        Returns:
            For each layer, the lengths that remain. For each layer, the number of tokens that its MLP processes. And
            the costs of comparing tokens.
        """
        if self.policy is None or self.shape is None:
            return [list(each) for each in lengths], [mlp_tokens] * len(lengths), self.predictors
        patches, left, counts, macs = self.shape.layout.patches, list[list[int]](), list[int](), 0
        for layer, each in enumerate(lengths, 1):
            left.append([self.policy.left_in(layer, length, patches) for length in each])
            counts.append(mlp_tokens if left[-1] == list(each) else sum(left[-1]))
            compared = zip(each, left[-1], strict=True)
            macs += sum(self.policy.reducer.predictor_macs(self.shape, *pair) for pair in compared)
        return left, counts, PartCosts(self.predictors.params, macs)


def token_costs(policy: TokenPolicy, shape: Shape, specs: Sequence[AttentionSpec], by: str = "compress") -> TokenCosts:
    """Returns the token counts and predictor costs of a token policy, without building the model.

    With `by="mask"`, no tokens are removed from the layers, so every predictor runs on all tokens. If a stage prunes
    nothing, its predictor does not run. The parameters of this predictor are still counted, because the model contains
    them.

    Raises:
        InvalidInput, NotSupported: The policy does not fit the model.
    """
    layout, depth = shape.layout, len(specs)
    policy = policy.on(layout, depth)
    tokens = (layout.tokens,) * depth if by == "mask" else policy.tokens(layout, depth)
    if layout.in_layers:
        return TokenCosts(tokens) if by == "mask" else TokenCosts(tokens, policy=policy, shape=shape)
    macs = 0
    for layer, count in zip(policy.layers, policy.counts(layout.patches), strict=True):
        if count < layout.patches:
            # A stage before layer l (counted from 1) gets the tokens and the keys of layer l - 1. Keys are padded to
            # the largest rank in that layer.
            compared = replace(shape, directions=max((*specs[layer - 2].ranks, 1)))
            macs += policy.reducer.predictor_macs(compared, tokens[layer - 2] - layout.prefix, count)
    with torch.device("meta"):  # parameters are only counted, so they need no memory and no random numbers
        predictor = policy.reducer.predictor(shape)
    numbers = sum(parameter.numel() for parameter in predictor.parameters())
    predictors = 1 if policy.reducer.one_predictor else len(policy.layers)
    return TokenCosts(tokens, PartCosts(predictors * numbers, macs))


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_product_macs(model: nn.Module, images: ImageBatch) -> int:
    """Counts the MACs per image of all matrix products and convolutions in one forward pass.

    With the eager backend, which does not pad, the count equals `ModelCosts.product_macs`.

    Raises:
        InvalidInput: The batch is empty.
        NotSupported: The model runs a fused attention kernel whose operations this version of torch cannot count.
    """
    if not len(images):
        raise InvalidInput("counting MACs needs at least one image; the batch is empty.")
    with counting(model) as counter, _Operations() as operations:
        model(images)
    counts = counter.get_flop_counts()["Global"]
    names = {operation: str(operation) for operation in operations.packets if not counts.get(operation)}
    # torch counts a kernel without a formula as zero. The total would then be too small without any warning.
    uncounted_kernels = sorted(name for name in names.values() if "scaled_dot_product" in name)
    if uncounted_kernels:
        raise NotSupported(
            f"torch {torch.__version__} does not count the operations of {', '.join(uncounted_kernels)}: "
            "run the attention on the eager backend."
        )
    return sum(counts.values()) // 2 // len(images)  # torch counts two operations for one MAC


@contextmanager
def counting(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Counts floating-point operations within the context. The model records no gradients there."""
    # no_grad is not enough. If an input is a parameter, as in timm's attention pooling, torch's counter raises an
    # AssertionError. So parameters do not require gradients inside the context. The model is not copied, because
    # callers read the number of tokens that its token reduction stores during the pass.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            require_gradient_(parameter, False)
        # A function mode disables the fast path of PyTorch's transformer layers, which is not counted.
        with torch.no_grad(), BaseTorchFunctionMode(), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        for parameter in trained:
            require_gradient_(parameter, True)


class _Operations(TorchDispatchMode):
    """Records which PyTorch operations run while the mode is active."""

    def __init__(self):
        super().__init__()
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))
