"""The costs of the parts of a model, as exact integers that add up to the whole and must agree with counted costs.

The convention is SVDA's, A.6. Parameters are all trainable tensors. A multiply-accumulate operation (MAC) is counted
for every matrix product of the patches and the layers, and one per token for every strength. Biases, LayerNorm, row
norms, softmax and GELU are not counted. The classifier's MACs are listed separately. Every layer counts all its tokens,
although a model may compute only the class token in the last block.
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

# torch 2.11 counts fused attention only on CUDA. Later versions register the same formula for the CPU.
_aten = torch.ops.aten
flop_registry.setdefault(
    _aten._scaled_dot_product_flash_attention_for_cpu, flop_registry[_aten._scaled_dot_product_flash_attention]
)


@dataclass(frozen=True)
class PartCosts:
    """Trainable parameters, and the MACs for one image."""

    params: int = 0
    macs: int = 0

    def __add__(self, other: "PartCosts") -> "PartCosts":
        return PartCosts(self.params + other.params, self.macs + other.macs)


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one transformer block, by part.

    `query_key` are the two score projections, and the products of queries and relative positions. `scores` are the
    products of queries and keys, `diagonal` the strengths, and `fusion` the matrix that mixes the score maps of blocks.
    `value_output` are the value and output projections, and `read_out` is attention times values. The costs of the
    attention are computed from `spec` and `tokens`.
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
        """Every part by its name. The parts add up to the layer."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: part for name, part in parts.items() if isinstance(part, PartCosts)}

    @property
    def total(self) -> PartCosts:
        """The whole layer."""
        return _sum(self.parts.values())

    def over(self, lengths: Sequence[int], mlp_tokens: int | None = None) -> "LayerCosts":
        """Returns the costs of the block for one image, if its attention runs on sequences of these `lengths`.

        The MLP processes all of these tokens, or `mlp_tokens` tokens if it is not None.
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
    """The costs of a whole model: patch embedding, layers, and the classifier with its norm.

    `embeddings` are the learned tokens and positions. They have MACs only with timm's `relpos`, an MLP that computes
    the bias of token pairs once per call. Its MACs are for a call with one image. `predictors` are the modules that
    select tokens between layers, so layers can have different numbers of tokens. `classifier_macs` are known, but not
    part of `macs`, as in the paper. One thing is not counted at all. If a reducer uses the class token's attention, an
    extra product beside a fused kernel computes it.
    """

    patches: PartCosts
    layers: tuple[LayerCosts, ...]
    classifier: PartCosts
    classifier_macs: int
    embeddings: PartCosts = PartCosts()
    predictors: PartCosts = PartCosts()

    @property
    def parts(self) -> dict[str, PartCosts]:
        """Every part by its name, summed over the layers. The parts add up to the model."""
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
        """Returns the costs inside a module that calls the parts several times or on other lengths for each image.

        Every layer runs on sequences of its `lengths` (`LayerCosts.over`). The patch embedding and the predictors run
        `patches` times, the classifier `heads` times.
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
        """The whole model."""
        return _sum(self.parts.values())

    @property
    def params(self) -> int:
        """The number of all trainable parameters."""
        return self.total.params

    @property
    def macs(self) -> int:
        """The MACs for one image, by the paper's convention."""
        return self.total.macs

    @property
    def product_macs(self) -> int:
        """The MACs of every matrix product and convolution, including the classifier's, as a FLOP counter counts."""
        # Strengths are multiplied elementwise, which a FLOP counter does not count.
        return self.macs + self.classifier_macs - sum(layer.diagonal.macs for layer in self.layers)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Each layer's number of tokens."""
        return tuple(layer.tokens for layer in self.layers)

    @property
    def directions(self) -> int:
        """The total number of score directions over all layers and heads."""
        return sum(layer.directions for layer in self.layers)

    def to_record(self) -> dict[str, Any]:
        """Returns the totals and every part as JSON-ready values."""
        return {
            "params": self.params, "macs": self.macs, "classifier_macs": self.classifier_macs,
            "predictor_macs": self.predictors.macs, "tokens": list(self.tokens), "directions": self.directions,
            "parts": {name: {"params": part.params, "macs": part.macs} for name, part in self.parts.items()},
        }  # fmt: skip


def _sum(parts: Iterable[PartCosts]) -> PartCosts:
    return sum(parts, start=PartCosts())


def layer_costs(spec: AttentionSpec, tokens: int, mlp: PartCosts, layer_norms: PartCosts) -> LayerCosts:
    """Returns the costs of a block with this attention, MLP and norms.

    The MACs follow the spec. A backend that pads heads to a common rank computes more.
    """
    # The projections compute `rows`, and the heads use `rank`. With original norms, more rows are computed than used.
    # Shared directions have one row for all heads.
    rows, rank, features = sum(spec.rows), sum(spec.ranks), sum(spec.value_dims)
    # A head without directions returns the mean of its values, so it needs no product of tokens with tokens.
    attending = sum(value_dim for head_rank, value_dim in zip(spec.ranks, spec.value_dims, strict=True) if head_rank)
    strengths = rank if spec.traits.has_strengths else 0
    # The mix is a matrix [heads, blocks], applied to every pair of tokens.
    mixed = len(spec.heads) * len(spec.blocks) if spec.blocks is not None else 0
    query, key = (linear_costs(spec.width, rows, tokens, bias=spec.has_bias(side)) for side in ("query", "key"))
    value = linear_costs(spec.width, features, tokens, bias=spec.has_bias("value"))
    output = linear_costs(sum(spec.value_dims), spec.width, tokens, bias=spec.has_bias("output"))
    # Every query is multiplied with the vectors of its distances to all rows and columns of a window. All heads may
    # share the vectors, so their parameters are counted with the rest of the block.
    distances = PartCosts(0, tokens * sum(spec.window or ()) * rank)
    return LayerCosts(
        query_key=query + key + distances,
        # Shared directions are multiplied in every head (`rank` sums over heads), but in blocks once for all heads.
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
    """Returns the costs of a linear map on every token."""
    return PartCosts((inputs + bias) * outputs, tokens * inputs * outputs)


@dataclass(frozen=True)
class TokenCosts:
    """Each layer's number of tokens, and the costs of the predictors."""

    tokens: tuple[int, ...]
    predictors: PartCosts = PartCosts()


def token_costs(policy: TokenPolicy, shape: Shape, specs: Sequence[AttentionSpec], by: str = "compress") -> TokenCosts:
    """Returns the costs of a policy in a model with these layers, without building the model.

    With a mask, all tokens stay in place, and every predictor runs on all of them. A stage that prunes nothing does not
    run its predictor, but the predictor exists. Parameters are counted on the predictor itself.

    Raises:
        InvalidInput, NotSupported: The policy does not fit the model.
    """
    layout, depth = shape.layout, len(specs)
    policy = policy.on(layout, depth)
    tokens = (layout.tokens,) * depth if by == "mask" else policy.tokens(layout, depth)
    macs = 0
    for layer, count in zip(policy.layers, policy.counts(layout.patches), strict=True):
        if count < layout.patches:
            # A stage before layer l (from 1) has the tokens of layer l - 1. It compares the keys of layer l - 1, which
            # are padded to the largest rank of its heads.
            compared = replace(shape, directions=max((*specs[layer - 2].ranks, 1)))
            macs += policy.reducer.predictor_macs(compared, tokens[layer - 2] - layout.prefix, count)
    with torch.device("meta"):  # only parameters are needed, so no memory and no random numbers
        predictor = policy.reducer.predictor(shape)
    numbers = sum(parameter.numel() for parameter in predictor.parameters())
    predictors = 1 if policy.reducer.one_predictor else len(policy.layers)
    return TokenCosts(tokens, PartCosts(predictors * numbers, macs))


def count_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def count_product_macs(model: nn.Module, images: ImageBatch) -> int:
    """Counts the MACs per image of every matrix product and convolution in one forward pass.

    The count equals `ModelCosts.product_macs` if the attention runs on the eager backend, which pads nothing. Raises
    NotSupported for a fused kernel that this build of torch cannot count.

    Raises:
        InvalidInput: The batch is empty.
    """
    if not len(images):
        raise InvalidInput("counting MACs needs at least one image; the batch is empty.")
    with counting(model) as counter, _Operations() as operations:
        model(images)
    counts = counter.get_flop_counts()["Global"]
    names = {operation: str(operation) for operation in operations.packets if not counts.get(operation)}
    # A fused kernel without a formula counts as zero, and the total would be too small without a warning.
    uncounted_kernels = sorted(name for name in names.values() if "scaled_dot_product" in name)
    if uncounted_kernels:
        raise NotSupported(
            f"torch {torch.__version__} does not count the operations of {', '.join(uncounted_kernels)}: "
            "run the attention on the eager backend."
        )
    return sum(counts.values()) // 2 // len(images)  # torch counts two operations for one MAC


@contextmanager
def counting(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Counts operations inside the context, without gradients. Operations on parameters are included."""
    # With only no_grad, torch's counter raises an AssertionError for timm's attention pooling, whose query is a
    # parameter. The model is not copied, because its token reduction stores the token numbers of the counted pass.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            require_gradient_(parameter, False)
        # While this mode is active, PyTorch's transformers do not use their fast path, which is not counted.
        with torch.no_grad(), BaseTorchFunctionMode(), FlopCounterMode(display=False) as counter:
            yield counter
    finally:
        for parameter in trained:
            require_gradient_(parameter, True)


class _Operations(TorchDispatchMode):
    """Records the names of the operations that ran."""

    def __init__(self):
        super().__init__()
        self.packets: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.packets.add(func.overloadpacket)
        return func(*args, **(kwargs or {}))
