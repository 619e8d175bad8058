"""attnrx's own models: their configuration, costs and layers, and SVDA's Vision Transformer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from attnrx.support.display import Displayed
from attnrx.support.errors import InvalidInput, NotSupported, UnknownName
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.records import from_dict, to_dict
from attnrx.support.shapes import Float, ImageBatch, Logits, Tensor, TokenBatch
from attnrx.vit.attention import Attention
from attnrx.vit.costs import LayerCosts, ModelCosts, PartCosts, TokenCosts, layer_costs, linear_costs
from attnrx.vit.kernels.native_products import NativeLinear
from attnrx.vit.maps import LINEAR_MAPS
from attnrx.vit.models.families import FAMILIES
from attnrx.vit.models.family import LayerShapes, MLPRanks, NamedFamily
from attnrx.vit.models.observation_hooks import recording_calls
from attnrx.vit.models.parts.mlp import FusedMLP, LowRankLinear, rank_of
from attnrx.vit.models.working.adopted import chunked_forward, require_images
from attnrx.vit.models.working.fused_block import BlockModules, fused_block
from attnrx.vit.models.working.token_hooks import forward_pass
from attnrx.vit.spec import FORMS, AttentionSpec
from attnrx.vit.tokens import TokenLayout

Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config", bound="TransformerConfig")

MOST_PATCHES = 65_536  # 4,096 x 4,096 pixels in patches of 16
MOST_HIDDEN = 2**20  # units of an MLP (ViT-22B has 24,576)


def full_spec(form: str, width: int, heads: int) -> AttentionSpec:
    """Returns the spec of an uncompressed layer, in which every head has width / heads directions.

    Raises:
        InvalidInput: The width cannot be divided among the heads.
    """
    if heads < 1 or width % heads:
        raise InvalidInput(f"width {width} cannot be divided among {heads} heads; choose a multiple.")
    head_dim = width // heads
    ranks, indices, traits = (head_dim,) * heads, tuple(range(heads)), FORMS[form]
    # The scale follows the original head dimension. The spec stores it, so compression cannot change the temperature.
    spec = AttentionSpec("dense", width, head_dim, ranks, indices, head_dim**-0.5, head_dim)
    # A full layer has one block per head. Every head uses only its own block, so the layer equals multi-head attention.
    if traits.mixes_blocks:
        return spec.with_shared_directions(width, ranks)
    return replace(spec, form=form, norms=traits.norms[0])


def block_costs(
    spec: AttentionSpec, tokens: int, hidden: int, mlp_ranks: tuple[int | None, int | None] = (None, None)
) -> LayerCosts:
    """Returns the costs of a pre-norm block with attention, an MLP with `hidden` features and two LayerNorms.

    `mlp_ranks` are the ranks of the MLP's two linear maps. A map with rank None is one full matrix. Any other map is
    stored as two factors, of which the second has the bias.
    """
    mlp = PartCosts()
    for inputs, outputs, rank in zip((spec.width, hidden), (hidden, spec.width), mlp_ranks, strict=True):
        if rank is None:
            mlp += linear_costs(inputs, outputs, tokens)
        else:
            mlp += linear_costs(inputs, rank, tokens, bias=False) + linear_costs(rank, outputs, tokens)
    return layer_costs(spec, tokens, mlp, norm_costs(spec.width) + norm_costs(spec.width))


def norm_costs(width: int) -> PartCosts:
    """Returns the costs of a LayerNorm, which has a gain and a bias per feature, and no MACs."""
    return PartCosts(2 * width, 0)


@dataclass(frozen=True)
class TransformerConfig(ABC):
    """The shape of an attnrx model and its input format. The defaults are the SVDA paper's settings for CIFAR-10.

    `attention` holds one spec per layer, so it describes compressed attention completely. `mlp_ranks` holds the ranks
    of every MLP's two maps, and None stands for a map that is stored as one matrix. If `mlp_ranks` is empty, no map is
    factored. `hidden_units` holds the number of hidden units of every MLP if some units were removed. `mean` and `std`
    normalize the input images, as in training. `geometry` describes how pictures are resized and cropped for the model,
    or is None if this is not known.
    """

    attention: tuple[AttentionSpec, ...]
    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    classes: int = 10
    mlp_ratio: float = 4.0
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    mlp_ranks: MLPRanks = ()
    hidden_units: tuple[int, ...] = ()
    geometry: ImageGeometry | None = None

    def __post_init__(self):
        if not self.attention:
            raise InvalidInput("a transformer needs at least one layer; give one AttentionSpec per layer.")
        for name in ("image_size", "patch_size", "channels", "classes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} is {getattr(self, name)}; it must be 1 or more.")
        if not 0 < self.mlp_ratio < math.inf or not all(0 < value < math.inf for value in self.std):
            raise InvalidInput(f"mlp_ratio {self.mlp_ratio} and std {self.std} must be positive and finite.")
        if self.width * self.mlp_ratio > MOST_HIDDEN:
            raise InvalidInput(
                f"mlp_ratio {self.mlp_ratio:g} of width {self.width}: an MLP has at most {MOST_HIDDEN:,} hidden units."
            )
        if self.patches > MOST_PATCHES:
            raise InvalidInput(
                f"image_size {self.image_size} with patch_size {self.patch_size} gives {self.patches:,} patches; at "
                f"most {MOST_PATCHES:,} are supported."
            )
        if self.image_size % self.patch_size:
            raise InvalidInput(f"patch_size {self.patch_size} does not divide image_size {self.image_size}.")
        for name, values in (("pairs of MLP ranks", self.mlp_ranks), ("hidden_units", self.hidden_units)):
            if values and len(values) != self.depth:
                raise InvalidInput(f"{len(values)} {name} for {self.depth} layers: give one each.")
        if self.geometry is not None and self.geometry.shape != self.input_shape:
            raise InvalidInput(
                f"geometry for images of {self.geometry.shape} (channels, height, width): the model takes "
                f"{self.input_shape}."
            )
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise InvalidInput(
                f"{len(self.mean)} means and {len(self.std)} stds for {self.channels} channels: give one each."
            )

    @property
    def width(self) -> int:
        return self.attention[0].width

    @property
    def depth(self) -> int:
        return len(self.attention)

    @property
    def hidden(self) -> int:
        return int(self.width * self.mlp_ratio)

    @property
    def patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.channels, self.image_size, self.image_size

    @property
    def tokens(self) -> int:
        """The number of tokens per image: the patches, and the class token if the model has one."""
        return self.patches

    def mlp_rank(self, layer: int) -> tuple[int | None, int | None]:
        """Returns the ranks of the two maps in one layer's MLP, with None for a map that is stored as one matrix."""
        return self.mlp_ranks[layer] if self.mlp_ranks else (None, None)

    def hidden_of(self, layer: int) -> int:
        """Returns the number of hidden units of one layer's MLP."""
        return self.hidden_units[layer] if self.hidden_units else self.hidden

    def with_layer(self: Config, index: int, spec: AttentionSpec) -> Config:
        return replace(self, attention=(*self.attention[:index], spec, *self.attention[index + 1 :]))

    def costs(self, attention: tuple[AttentionSpec, ...] | None = None, tokens: TokenCosts | None = None) -> ModelCosts:
        """Returns the model's costs without building the model, optionally for other attention specs or token counts.

        To compute the costs of a prescription before you realize it, pass its specs.

        Raises:
            InvalidInput: `attention` does not have one spec per layer.
        """
        attention = self.attention if attention is None else attention
        if len(attention) != self.depth:
            raise InvalidInput(f"{len(attention)} attention specs for {self.depth} layers: give one for each layer.")
        tokens = tokens or TokenCosts((self.tokens,) * self.depth)
        return ModelCosts(
            patches=self.patch_costs(),
            layers=tuple(
                block_costs(spec, num_tokens, self.hidden_of(index), self.mlp_rank(index))
                for index, (spec, num_tokens) in enumerate(zip(attention, tokens.tokens, strict=True))
            ),
            # The classifier runs on one pooled token, so its MACs do not depend on the number of tokens.
            classifier=norm_costs(self.width) + PartCosts((self.width + 1) * self.classes),
            classifier_macs=self.width * self.classes,
            predictors=tokens.predictors,
        )

    @abstractmethod
    def patch_costs(self) -> PartCosts:
        """Returns the costs of the patch embedding."""


class Layer(nn.Module):
    """One pre-norm transformer block. Its MLP has two linear maps, which may be low-rank, with a GELU between them."""

    def __init__(self, config: TransformerConfig, index: int):
        super().__init__()
        spec, (first, second) = config.attention[index], config.mlp_rank(index)
        hidden = config.hidden_of(index)
        self.attention_norm = nn.LayerNorm(spec.width)
        self.attention = Attention(spec)
        self.mlp_norm = nn.LayerNorm(spec.width)
        self.mlp = FusedMLP(_linear(spec.width, hidden, first), nn.GELU(), _linear(hidden, spec.width, second))

    def forward(self, tokens: TokenBatch) -> TokenBatch:
        modules = BlockModules((self.attention_norm, self.mlp_norm), self.attention, self.mlp)
        fused = fused_block(tokens, modules)
        if fused is not None:
            return fused
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.mlp(self.mlp_norm(tokens))


def _linear(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    return NativeLinear(inputs, outputs) if rank is None else LowRankLinear(inputs, outputs, rank)


class Transformer(nn.Module, Generic[Config]):
    """The base class of attnrx's own models, which have layers, a final norm, a classifier and a configuration."""

    layers: nn.ModuleList
    norm: nn.LayerNorm
    classifier: nn.Linear

    def __init__(self, config: Config):
        super().__init__()
        self.config: Config = config
        # The token policy is a submodule, so that its learned predictors are trained and saved with the model.
        self.tokens: nn.Module | None = None

    @property
    def origin(self) -> Config:
        """The configuration, including the input format. Working copies of library models also have an `origin`."""
        return self.config

    def forward(self, images: ImageBatch) -> Logits:
        """Returns the logits."""
        require_images(images, self.config.input_shape, "this model")
        # The chunk size follows from the largest activation per image, which is the hidden layer of an MLP.
        return chunked_forward(self, self._forward_chunk, images, self.config.patches * self.config.hidden)

    def _forward_chunk(self, images: ImageBatch) -> Logits:
        with forward_pass(self):
            return self.logits(images)

    def logits(self, images: ImageBatch) -> Logits:
        """Returns the logits of images whose shape was already checked."""
        raise NotImplementedError


def initialize_(model: Model, seed: int, strength: float = 1.0) -> Model:
    """Initializes the weights of an attnrx model in place, and returns the model.

    Weights are drawn from a truncated normal distribution with standard deviation 0.02. Biases are zero, norm weights
    are one, and every strength is `strength`. A score is at most max|strength| / sqrt(head_dim) (SVDA, Theorem 1), so
    with strength 1 attention starts almost uniform.

    Raises:
        InvalidInput: The strength is not positive and finite.
    """
    if not (math.isfinite(strength) and strength > 0):
        raise InvalidInput(f"strength={strength}: the initial strength must be a positive finite number.")
    # With a separate generator, the weights depend only on the seed, and the global random state does not change.
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("strength"):
            nn.init.constant_(parameter, strength)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" in name:
            nn.init.ones_(parameter)
        else:
            nn.init.trunc_normal_(parameter, std=0.02, generator=generator)
    return model


class AttnrxFamily(NamedFamily, Generic[Config]):
    """The base class for families of attnrx's own models, in which a configuration describes each model."""

    model_type: type[Transformer[Config]]
    config_type: type[Config]

    @abstractmethod
    def config(self, name: str, **changes: Any) -> Config:
        """Returns the configuration of the named model. `changes` override its fields."""

    def fresh(self, name: str, seed: int = 0, strength: float = 1.0, **changes: Any) -> Transformer[Config]:
        """Builds and initializes the named model. In SVDA models, `strength` is every direction's initial strength."""
        return initialize_(self.model_type(self.config(name, **changes)), seed, strength)

    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(f"layers.{index}" for index in range(len(self._transformer(model).layers)))

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        return tuple(layer.attention for layer in self._transformer(model).layers)  # type: ignore[misc]

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        transformer = self._transformer(model)
        transformer.layers[layer].attention = attention
        # Costs and saved files are made from the configuration, so it must describe the current layers.
        transformer.config = transformer.config.with_layer(layer, attention.spec)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        return tuple((layer.mlp.fc1, layer.mlp.fc2) for layer in self._transformer(model).layers)  # type: ignore[union-attr]

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        transformer = self._transformer(model)
        config = transformer.config
        transformer.set_submodule(f"layers.{layer}.mlp.{LINEAR_MAPS[which]}", linear)
        ranks = [list(config.mlp_rank(index)) for index in range(config.depth)]
        ranks[layer][which] = rank_of(linear)
        # The number of hidden units is the number of outputs of the first map, and of inputs of the second.
        units = [config.hidden_of(index) for index in range(config.depth)]
        units[layer] = linear.in_features if which else linear.out_features  # type: ignore[assignment]
        transformer.config = replace(
            config,
            mlp_ranks=tuple((first, second) for first, second in ranks),
            # `hidden_units` is empty if no unit was removed, so that equal models have equal configurations.
            hidden_units=() if set(units) == {config.hidden} else tuple(units),
        )

    def describe(self, model: nn.Module) -> dict[str, Any]:
        return to_dict(self._transformer(model).config)

    def build(self, description: Mapping[str, Any]) -> nn.Module:
        return self.model_type(from_dict(description, (self.config_type, AttentionSpec, ImageGeometry)))

    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        _, *size = self.input_shape(model)
        raise NotSupported(
            f"this {type(model).__name__} takes images of {size[0]} x {size[1]} only, not of {height} x {width}: "
            "give images of that size, or build the model with image_size=... and train it."
        )

    def geometry(self, model: nn.Module) -> ImageGeometry | None:
        return self._transformer(model).config.geometry

    def num_tokens(self, model: nn.Module) -> int:
        return self._transformer(model).config.tokens

    def costs_with(self, model: nn.Module, shapes: LayerShapes) -> ModelCosts:
        # Only the configuration is changed, so the costs of a prescription are known before it is realized.
        config = replace(self._transformer(model).config, mlp_ranks=shapes.mlp_ranks, hidden_units=shapes.hidden)
        return config.costs(shapes.attention, shapes.tokens)

    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        """Returns the patch features after the last norm."""
        transformer = self._transformer(model)
        require_images(images, transformer.config.input_shape, "this model")
        # The norm's output is recorded, because `logits` returns no tokens. The images are not split into chunks, so
        # that the norm runs only once.
        with (
            recording_calls((transformer.norm,), lambda call: call.output) as outputs,
            forward_pass(model, (transformer.config.depth - 1,)),
        ):
            transformer.logits(images)
        return outputs[0][:, self.token_layout(model).prefix :]

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        return self._transformer(model).norm

    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        return (self._transformer(model).classifier,)

    def _transformer(self, model: nn.Module) -> Transformer[Config]:
        return self._own(model)


# Input scenarios of the SVDA paper (Tables 3 and 4), and small scenarios for demonstrations and tests.
SCENARIOS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"channels": 1, "classes": 10},
    "cifar10": {"classes": 10},
    "cifar100": {"classes": 100},
    "food101": {"classes": 101, "image_size": 224, "patch_size": 16},
    "tiny_imagenet": {"classes": 200, "image_size": 64, "patch_size": 8},
    "imagenette": {"classes": 10, "image_size": 224, "patch_size": 16},
    "imagenet-1k": {"classes": 1000, "image_size": 224, "patch_size": 16},
    "digits": {"channels": 1, "classes": 10, "image_size": 16, "patch_size": 2, "width": 64, "depth": 3, "heads": 4},
    "cluttered-digits": {
        "channels": 1, "classes": 10, "image_size": 40, "patch_size": 4, "width": 64, "depth": 6, "heads": 4,
        "mlp_ratio": 2.0,
    },
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class ViTConfig(Displayed, TransformerConfig):
    """The shape and the input format of attnrx's own Vision Transformer, which has no class token."""

    def __post_init__(self):
        super().__post_init__()
        if self.width % 4:
            raise InvalidInput(f"width {self.width} must be a multiple of 4 for two-dimensional sine-cosine positions.")

    @classmethod
    def uniform(
        cls, form: str = "svda", *, width: int = 256, depth: int = 4, heads: int = 4, **facts: Any
    ) -> "ViTConfig":
        """Returns the configuration of an uncompressed model with `depth` equal layers.

        Depth, heads, width and patch size default to the values in the SVDA paper (Table 4). The paper does not state
        the MLP width. With four times the model width, the savings equal the paper's printed savings.
        """
        half = (0.5,) * facts.get("channels", 3)
        return cls(attention=(full_spec(form, width, heads),) * depth, **{"mean": half, "std": half, **facts})

    def patch_costs(self) -> PartCosts:
        return linear_costs(self.channels * self.patch_size**2, self.width, self.patches)


class VisionTransformer(Transformer[ViTConfig]):
    """A Vision Transformer with fixed sine-cosine position embeddings and mean pooling, without a class token."""

    positions: Tensor

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.patches = nn.Conv2d(config.channels, config.width, config.patch_size, config.patch_size)
        # Positions are computed on the CPU even if the module is built on the meta device, because no file stores them.
        positions = sincos_positions(config.image_size // config.patch_size, config.width)
        # A buffer follows the model's device. It is not saved, because the configuration determines it.
        self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)

    def logits(self, images: ImageBatch) -> Logits:
        tokens = self.patches(images).flatten(2).transpose(1, 2)  # batch, patches, width
        tokens = tokens + self.positions.to(tokens.dtype)
        for layer in self.layers:
            tokens = layer(tokens)
        return self.classifier(self.norm(tokens).mean(1))


def sincos_positions(side: int, width: int) -> Float[Tensor, "tokens width"]:
    """Returns fixed two-dimensional sine-cosine position embeddings.

    Each quarter of the width encodes one function: the sine of the row, the cosine of the row, the sine of the column,
    and the cosine of the column.
    """
    # Computed in float64 and rounded once at the end. The frequencies fall from 1 to just above 1/10,000.
    frequencies = torch.logspace(0, -1, width // 4 + 1, base=10_000.0, device="cpu", dtype=torch.float64)[:-1]
    angles = torch.arange(side, device="cpu", dtype=torch.float64)[:, None] * frequencies
    row = angles[:, None].expand(side, side, -1)
    column = angles[None].expand(side, side, -1)
    table = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=-1)
    return table.flatten(0, 1).to(torch.get_default_dtype())


class ViTFamily(AttnrxFamily[ViTConfig]):
    """The family of the models `svda:SCENARIO` and `dense:SCENARIO`, e.g. `svda:cifar10`."""

    name = "vit"
    model_type = VisionTransformer
    config_type = ViTConfig
    fits_data = True  # a scenario fits any data of its image size

    def names(self) -> tuple[str, ...]:
        return tuple(f"{form}:{scenario}" for form in ("svda", "dense") for scenario in SCENARIOS)

    def config(self, name: str, **changes: Any) -> ViTConfig:
        return named_config(*name.split(":"), **changes)

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        return self._transformer(model).get_submodule("patches")

    def token_layout(self, model: nn.Module) -> TokenLayout:
        return TokenLayout(0, self._transformer(model).config.patches, class_token=False, pooled="mean")


def named_config(form: str, scenario: str, **changes: Any) -> ViTConfig:
    """Returns the configuration of the model `form:scenario`.

    `changes` override the width, the depth, the number of heads, or fields of ViTConfig.

    Raises:
        UnknownName: There is no such scenario.
    """
    if scenario not in SCENARIOS:
        raise UnknownName("configuration", scenario, SCENARIOS)
    return ViTConfig.uniform(form, **{**SCENARIOS[scenario], **changes})


FAMILIES.register(ViTFamily())
