"""Models of other libraries whose attention is replaced by attnrx attention: adoption by proof, rebuilding, costs."""

import copy
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.costs import ModelCosts, PartCosts, layer_costs
from attnrx.errors import InvalidInput, NotSupported
from attnrx.maps import LINEAR_MAPS
from attnrx.models.chunked_forward import ImageModel
from attnrx.models.family import Family, LowRankLinear, MLPRanks, rank_of
from attnrx.models.observation_hooks import evaluating
from attnrx.models.token_hooks import costs_of_tokens
from attnrx.serialization.config import from_dict, to_dict
from attnrx.serialization.storage import require_finite_tensors
from attnrx.shapes import Logits, Tensor, TokenBatch
from attnrx.spec import BIASES, AttentionSpec
from attnrx.tokens import TokenLayout, TokenPolicy

# The projections in attnrx attention, in the order of BIASES.
PROJECTION_PATHS = ("scores.query", "scores.key", "value", "output")

# Feature by which attention is not plain -> the attributes that show it unless they are None or an identity. The first
# group is read of any module, the second of attention modules only.
POOLING = "attn_pool"  # a pooling head before the classifier, not the attention of a layer
MODEL_FEATURES: dict[str, tuple[str, ...]] = {
    "rotary positions": ("rope", "rope_embed", "rope_embeddings", "rotary_emb"),
    "relative position bias": ("rel_pos_bias", "shared_rel_pos"),
    "attention pooling before the classifier": (POOLING,),
}
ATTENTION_FEATURES: dict[str, tuple[str, ...]] = {
    "QK-norm": ("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
    "a norm between attention and output projection": ("norm",),
    "a gate on the output of attention": ("gate",),
    "relative position bias": ("rel_pos", "relative_position_bias", "relative_position_bias_table"),
    "differential attention": ("lambda_q1", "lambda_a"),
    "talking heads": ("proj_l", "proj_w"),
}


@dataclass(frozen=True)
class Origin:
    """How the model was created by its own library, and its input format.

    `arguments` are JSON values: the keyword arguments of timm's entrypoint, or the configuration of transformers.
    """

    architecture: str
    arguments: Mapping[str, Any]
    input_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Parts:
    """Where the parts of a library's model are.

    `last_norm` is the norm after the last block (an identity where a norm follows the mean in its place),
    `norm_before` the path, inside a block, of the norm before its attention, if any. `prefix` is the number of tokens
    before the patches, of which the first may be a class token. `pooled` is "class", "mean", or another name for an
    unsupported kind of pooling. A model that `resizes` its position embeddings takes images of other sizes.
    """

    blocks: tuple[nn.Module, ...]
    patches: nn.Conv2d
    last_norm: nn.Module
    norm_before: str | None
    prefix: int
    class_token: bool
    pooled: str
    resizes: bool


class LastLayer:
    """A hook before the last block: only the tokens before the patches pass through it, and they attend to all tokens.

    The logits do not change. The shortcut is active only while `at_work` is True, which the model sets during its
    forward pass. The MACs of a model (`attnrx.costs`) count all tokens, as papers do.
    """

    by_image = True

    def __init__(self, parts: Parts, attention: str):
        """Registers the hook; `attention` is the path of the adapter inside the block."""
        self.block, self.attention, self.norm = parts.blocks[-1], attention, parts.norm_before
        self.after, self.prefix = parts.last_norm, parts.prefix
        self.at_work = False
        self.block.register_forward_pre_hook(self, with_kwargs=True)

    @property
    def watched(self) -> bool:
        """Whether the patch tokens of the last block are needed: for training, or by a hook."""
        for module in (*self.block.modules(), self.after):
            hooks = module._forward_pre_hooks.values()
            if module.training or module._forward_hooks or not all(getattr(hook, "by_image", False) for hook in hooks):
                return True
        return False

    def __call__(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Passes the tokens before the patches to the block, and all tokens to the attention as key/value tokens."""
        tokens = args[0] if args else kwargs["hidden_states"]  # timm passes them by position, transformers by name
        adapter: Any = block.get_submodule(self.attention)
        own: Attention = adapter.attention
        # A head of rank 0 has no backend, and not every backend takes fewer queries than keys.
        if not (self.at_work and all(own.spec.ranks or (0,)) and own.plan(tokens).backend.takes_few_queries):
            return args, kwargs
        adapter.key_value_tokens = tokens if self.norm is None else block.get_submodule(self.norm)(tokens)
        queries = tokens[:, : self.prefix]
        return ((queries, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": queries})


class Adopted(ImageModel):
    """A model of another library, `source`, with attnrx attention in every layer; returns its logits."""

    def __init__(self, source: nn.Module, origin: Origin):
        super().__init__()
        self.source = source
        self.origin = origin
        self.last: LastLayer | None = None

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.origin.input_shape

    @property
    def largest(self) -> int:
        """Elements per image of the largest activation, taken as the hidden layer of an MLP of ratio 4."""
        convolution = next(part for part in self.source.modules() if isinstance(part, nn.Conv2d))
        return 4 * convolution.out_channels * patch_count(self.input_shape, convolution)

    def logits(self, images: Tensor) -> Logits:
        """Returns the logits; the last block computes only the class token where the head uses no other token."""
        if self.last is None or self.last.watched:
            return self.source_logits(images)
        self.last.at_work = True
        try:
            return self.source_logits(images)
        finally:
            self.last.at_work = False

    def source_logits(self, images: Tensor) -> Logits:
        return self.source(images)


def patch_count(input_shape: tuple[int, int, int], convolution: nn.Conv2d) -> int:
    """Returns the number of patches of an image."""
    (height, width), (down, right) = input_shape[1:], convolution.stride
    return (height // down) * (width // right)


class Adapter(nn.Module):
    """Replaces the attention module of a layer and calls attnrx attention.

    `key_value_tokens` holds the key/value tokens of the next call where its queries are a subset of them; else None.
    """

    def __init__(self, attention: Attention):
        super().__init__()
        self.attention = attention
        self.key_value_tokens: Tensor | None = None

    def mixed(self, tokens: TokenBatch) -> TokenBatch:
        key_value_tokens = self.key_value_tokens
        if key_value_tokens is None:
            return self.attention(tokens)
        self.key_value_tokens = None
        return self.attention(tokens, key_value_tokens)


def assembled(weights: Sequence[Tensor], biases: Sequence[Tensor | None], heads: int, scale: float) -> Attention:
    """Returns dense attnrx attention with copies of four projections: query, key, value, output.

    The rows of query, key and value, and the columns of output, are sorted by head.
    """
    rows, width = weights[0].shape
    ranks = (rows // heads,) * heads
    present = tuple(name for name, bias in zip(BIASES, biases, strict=True) if bias is not None)
    spec = AttentionSpec("dense", width, ranks[0], ranks, tuple(range(heads)), float(scale), ranks[0], biases=present)
    with torch.device("meta"):
        attention = Attention(spec)
    tensors = {f"{path}.weight": weight for path, weight in zip(PROJECTION_PATHS, weights, strict=True)}
    named_biases = zip(PROJECTION_PATHS, biases, strict=True)
    tensors |= {f"{path}.bias": bias for path, bias in named_biases if bias is not None}
    # Cloned, because the slices of a fused projection share one storage.
    attention.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()}, assign=True)
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(tensors[name].requires_grad)
    return attention


class AdoptedFamily(Family):
    """A family of models of another library; a subclass states where their parts are, and lists what it refuses."""

    library: str
    """The package of the library; `adoptable` names the classes that can be adopted."""
    adoptable: str
    adapter_type: type[Adapter]
    attention_name: str
    """The name of the attention in a block."""
    mlp_paths = (f"mlp.{LINEAR_MAPS[0]}", f"mlp.{LINEAR_MAPS[1]}")
    mlp_types: tuple[str, ...]
    """Classes of MLPs with two linear maps, fc1 and fc2, and an activation between them; others are not compressed."""
    head_names: tuple[str, ...]
    """Paths, in the source, of the classifier and the norm before it; paths that a model lacks are skipped."""
    classifier_names: tuple[str, ...]
    """The entries of `head_names` that are classifiers; two for models with a distillation token."""
    pooled_names: tuple[str, ...] = ()
    """Those of `head_names` that run on one pooled token instead of all tokens."""

    @abstractmethod
    def parts(self, source: Any) -> Parts:
        """Returns where the parts of the model are."""

    @abstractmethod
    def refusals(self, model: Any) -> Iterator[str]:
        """Yields the unsupported classes and options of the model, without reading its weights."""

    @abstractmethod
    def origin(self, model: Any) -> Origin:
        """Returns how the model was created, and its input format."""

    @abstractmethod
    def create(self, origin: Origin) -> nn.Module:
        """Creates the model with its own library, without pretrained weights."""

    @abstractmethod
    def own(self, attention: Any) -> Attention:
        """Returns attnrx attention with the weights of a library's attention module."""

    @abstractmethod
    def initialized(self, name: str, **arguments: Any) -> nn.Module:
        """Returns the library's model of this name with weights from seed 0, or none on the meta device."""

    def adopts(self, model: nn.Module) -> bool:
        """Returns whether the model comes from this library, so that `adopt` accepts or refuses it; imports nothing."""
        return type(model).__module__.split(".")[0] == self.library

    def adopt(self, model: nn.Module, **stated: Any) -> Adopted:
        """Returns a deep copy of the model with attnrx attention in every layer; the model itself is not changed.

        Two properties are checked on random images first, unless the model is on the meta device: the copy returns the
        logits of the model, and so does a model rebuilt from the description of the copy. `mean` and `std` override the
        model's own normalization; `input_shape` overrides its image size, only for models that resize their position
        embeddings.

        Raises:
            NotSupported: The model has an unsupported feature, named in the message.
        """
        self.require_supported(model)
        origin = self._with(self.origin(model), self.parts(model), stated)
        adopted = self.model_type(copy.deepcopy(model), origin)
        adopted.training = model.training  # of the wrapper only: every module inside keeps its own mode
        attention = [self.own(getattr(layer, self.attention_name)) for layer in self.layers(adopted.source)]
        self._install_(adopted, attention)
        if not next(model.parameters()).is_meta:
            require_finite_tensors(model.state_dict(), _class_of(model))
            because = "its attention computes something else than plain softmax attention"
            require_equal_logits(self.model_type(model, origin), adopted, because)
            self._require_rebuilt(adopted)
        return adopted

    def _with(self, origin: Origin, parts: Parts, stated: Mapping[str, Any]) -> Origin:
        """Returns the origin with the stated input format, which must fit the model."""
        stated = {name: tuple(value) for name, value in stated.items()}
        (channels, *size), strides = stated.get("input_shape", origin.input_shape), parts.patches.stride
        tiles = not any(length % stride for length, stride in zip(size, strides, strict=True))
        if not tiles or ((channels, *size) != origin.input_shape and not parts.resizes):
            raise InvalidInput(
                f"{origin.architecture} was created for images of {origin.input_shape} in patches of {strides}, which "
                f"does not fit {(channels, *size)}: create it with another img_size."
            )
        origin = replace(origin, **stated)
        if not len(origin.mean) == len(origin.std) == channels or min(origin.std) <= 0:
            raise InvalidInput(
                f"{origin.architecture} has {channels} channels, but is normalized with mean={origin.mean} and "
                f"std={origin.std}: give one mean and one positive std for each channel."
            )
        return origin

    def require_supported(self, model: nn.Module) -> None:
        """Raises NotSupported with every unsupported feature of the model; does not read its weights."""
        reasons = dict.fromkeys((*features(model), *self.refusals(model)))
        if reasons:
            raise NotSupported(f"{_class_of(model)} is not supported: {', '.join(reasons)}. {self.adoptable}")

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        """Sets the attention of every layer, removes dropout of rate 0, and enables the shortcut of `LastLayer` for
        models with class-token pooling.
        """
        parts = self.parts(adopted.source)
        for layer, own in zip(parts.blocks, attention, strict=True):
            theirs = getattr(layer, self.attention_name)
            setattr(layer, self.attention_name, self.adapter_type(own).train(theirs.training))
            for name, part in list(layer.named_modules(remove_duplicate=False)):
                # Calling a dropout takes as long as a small matrix product.
                if type(part) is nn.Dropout and part.p == 0:
                    layer.set_submodule(name, nn.Identity().train(part.training))
        if parts.pooled == "class":
            adopted.last = LastLayer(parts, self.attention_name)

    def _require_rebuilt(self, adopted: Adopted) -> None:
        because = "a model rebuilt from its name and arguments differs, so it was changed after it was created"
        with torch.device("meta"):
            rebuilt = self.build(self.describe(adopted))
        shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (adopted, rebuilt)]
        if str(adopted) != str(rebuilt) or shapes[0] != shapes[1]:
            raise NotSupported(f"{adopted.origin.architecture} cannot be adopted: {because}.")
        rebuilt.load_state_dict(adopted.state_dict(), assign=True)
        require_equal_logits(adopted, rebuilt, because)

    def library_model(self, model: Any) -> nn.Module:
        """Creates the model with its own library, which keeps that library's attention."""
        return self.create(model.origin)

    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the blocks of the library's model."""
        return self.parts(source).blocks

    def blocks(self, model: Any) -> tuple[nn.Module, ...]:
        return self.layers(model.source)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        known = all(type(block.mlp).__name__ in self.mlp_types for block in self.blocks(model))
        return super().mlp(model) if known else ()

    def describe(self, model: Any) -> dict[str, Any]:
        """Returns how the model was created, the spec of every layer's attention, and the ranks of its MLP."""
        origin = model.origin
        return {
            "architecture": origin.architecture,
            "arguments": dict(origin.arguments),
            "input_shape": list(origin.input_shape),
            "mean": list(origin.mean),
            "std": list(origin.std),
            "attention": [to_dict(attention.spec) for attention in self.attention(model)],
            "mlp_ranks": [[rank_of(linear) for linear in pair] for pair in self.mlp(model)],
        }

    def build(self, description: Mapping[str, Any]) -> Adopted:
        """Creates the described model with its own library, then inserts attention and MLPs of the described ranks."""
        facts = {name: tuple(description[name]) for name in ("input_shape", "mean", "std")}
        origin = Origin(description["architecture"], description["arguments"], **facts)
        adopted = self.model_type(self.create(origin), origin)
        layers, specs = self.layers(adopted.source), description["attention"]
        if len(layers) != len(specs):
            raise InvalidInput(f"{origin.architecture} has {len(layers)} layers, but {len(specs)} are described.")
        self._install_(adopted, [Attention(from_dict(spec, (AttentionSpec,))) for spec in specs])
        for layer, pair in enumerate(description["mlp_ranks"]):
            for which, rank in enumerate(pair):
                if rank is not None:
                    linear: Any = self.mlp(adopted)[layer][which]
                    factors = LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None)
                    self.set_mlp_(adopted, layer, which, factors)
        return adopted

    def normalization(self, model: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return model.origin.mean, model.origin.std

    def token_layout(self, model: Any) -> TokenLayout:
        parts = self.parts(model.source)
        if parts.pooled not in ("class", "mean"):
            raise NotSupported(
                f"{model.origin.architecture} pools its tokens by {parts.pooled!r}; tokens can be pruned only where "
                "the head takes a token before the patches, or the mean of the patches."
            )
        return TokenLayout(parts.prefix, patch_count(model.input_shape, parts.patches), parts.class_token, parts.pooled)

    def patch_embedding(self, model: Any) -> nn.Module:
        return self.parts(model.source).patches

    def pooled_norm(self, model: Any) -> nn.Module:
        return self.parts(model.source).last_norm

    def heads(self, model: Any) -> tuple[nn.Linear, ...]:
        named = dict(model.source.named_modules())
        found = (named.get(name) for name in self.classifier_names)
        return tuple(head for head in found if isinstance(head, nn.Linear))

    def costs(
        self,
        model: Any,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: MLPRanks | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Returns the costs of the model, optionally with other specs, ranks and tokens in its layers.

        All parameters before the first layer (tokens and position embeddings too) count as patches. Parameters of a
        layer outside attention and MLP (LayerScale too) count as its norms. The parameters therefore add up to those of
        the model.
        """
        source, maps, parts = model.source, self.mlp(model), self.parts(model.source)
        specs = tuple(own.spec for own in self.attention(model)) if attention is None else attention
        ranks = tuple((rank_of(first), rank_of(second)) for first, second in maps) if mlp_ranks is None else mlp_ranks
        if len(specs) != len(parts.blocks) or len(ranks) != len(maps):
            raise InvalidInput(
                f"{len(specs)} attention specs and {len(ranks)} pairs of MLP ranks for {len(parts.blocks)} layers and "
                f"{len(maps)} MLPs of two maps: give one for each."
            )
        positions = patch_count(model.input_shape, parts.patches)
        token_costs = costs_of_tokens(model, self, tokens, specs, positions + parts.prefix)
        heads = [module for name, module in source.named_modules() if name in self.head_names]
        classifier = sum(map(_params, heads))
        before = _params(source) - classifier - sum(map(_params, parts.blocks))
        changes = list(zip(maps, ranks, strict=True)) or [((), ())] * len(specs)
        layers = []
        for block, spec, change, own in zip(parts.blocks, specs, changes, token_costs.tokens, strict=True):
            mlp, theirs = block.get_submodule("mlp"), block.get_submodule(self.attention_name)
            norms = PartCosts(_params(block) - _params(theirs) - _params(mlp))
            layers.append(replace(layer_costs(spec, own, 0), mlp=_mlp_costs(mlp, own, *change), layer_norms=norms))
        return ModelCosts(
            patches=PartCosts(before, positions * parts.patches.weight.numel()),
            layers=tuple(layers),
            classifier=PartCosts(classifier),
            classifier_macs=sum(map(_matrices, heads)),
            predictors=token_costs.predictors,
            predictor_norm_features=token_costs.norm_features,
            outer_norm_features=self._outer_norm_features(source, positions, token_costs.tokens),
        )

    def _outer_norm_features(self, source: nn.Module, positions: int, tokens: tuple[int, ...]) -> int:
        """Returns the features of the norms outside the layers, times the tokens that each of them normalizes."""
        parts, total = self.parts(source), 0
        inside = {module for block in parts.blocks for module in block.modules()}
        for name, module in source.named_modules():
            shape = getattr(module, "normalized_shape", None)
            if shape is None or module in inside:
                continue
            if name in self.pooled_names:
                count = 1
            elif name.startswith("patch_embed."):
                count = positions
            else:
                count = tokens[-1] if module is parts.last_norm else tokens[0]
            total += math.prod(shape) * count
        return total


def features(model: nn.Module) -> Iterator[str]:
    """Yields the features by which attention anywhere in the model is not plain softmax attention."""
    for name, module in model.named_modules():
        is_attention = "Att" in type(module).__name__ and POOLING not in name.split(".")
        for feature, attributes in (*MODEL_FEATURES.items(), *(ATTENTION_FEATURES.items() if is_attention else ())):
            if not all(isinstance(getattr(module, attribute, None), nn.Identity | None) for attribute in attributes):
                yield feature


def changed_linears(module: nn.Module, names: tuple[str, ...]) -> Iterator[str]:
    """Yields the projections that are not a plain nn.Linear: adapters, quantization, parametrizations."""
    for name in names:
        kind = type(getattr(module, name))
        if kind is not nn.Linear:
            yield f"the projection {name} is a {kind.__name__}, not a plain Linear (merge adapters, undo quantization)"


def require_equal_logits(first: Adopted, second: Adopted, because: str) -> None:
    """Raises NotSupported unless both models return the same logits for the same random images, up to rounding.

    The limit is the square root of the machine epsilon, relative to the largest logit: rounding is far below it, and a
    missing norm, bias or scale far above. The epsilon is at least that of float32, because some attention computes its
    softmax in it.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn((2, *first.input_shape), generator=generator, dtype=torch.float64, device="cpu")
    images = images.to(next(first.parameters()))
    with evaluating((first, second)):
        expected, actual = first(images), second(images)
    epsilon = max(torch.finfo(expected.dtype).eps, torch.finfo(torch.float32).eps)
    limit = epsilon**0.5 * max(1.0, float(expected.abs().max()))
    difference = float((expected - actual).abs().max())
    if not difference <= limit:  # also true for NaN
        raise NotSupported(
            f"{first.origin.architecture} cannot be adopted: {because}. On random images the logits differ by "
            f"{difference:.3g}; rounding explains at most {limit:.3g}."
        )


def _class_of(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__name__}"


def _params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _matrices(module: nn.Module) -> int:
    """Returns the entries of all linear maps in a module: its MACs for one token."""
    return sum(linear.weight.numel() for linear in module.modules() if isinstance(linear, nn.Linear))


def _mlp_costs(mlp: nn.Module, tokens: int, maps: tuple[Any, ...], ranks: tuple[int | None, ...]) -> PartCosts:
    """Returns the costs of an MLP with its `maps`, if given, in these ranks (None: one matrix)."""
    saved = 0
    for linear, rank in zip(maps, ranks, strict=True):
        inputs, outputs = linear.in_features, linear.out_features
        saved += _matrices(linear) - (inputs * outputs if rank is None else rank * (inputs + outputs))
    return PartCosts(_params(mlp) - saved, tokens * (_matrices(mlp) - saved))
