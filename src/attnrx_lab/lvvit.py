"""LV-ViT (Jiang et al., 2021, All Tokens Matter), with a convolutional stem and a second classifier for the patches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import CheckpointError, InvalidInput, UnknownName
from attnrx.support.preprocessing import IMAGENET, ImageGeometry
from attnrx.support.shapes import Float, ImageBatch, Logits, Tensor, TokenBatch
from attnrx.support.storage import require_finite_tensors
from attnrx.vit.costs import ModelCosts, PartCosts, TokenCosts, linear_costs
from attnrx.vit.models import FAMILIES
from attnrx.vit.models.checkpoint import read_weight_file
from attnrx.vit.models.working.adopted import require_images
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import TokenLayout
from attnrx_lab.vision_transformer import AttnrxFamily, Layer, Transformer, TransformerConfig, full_spec, norm_costs

CROP = 0.9  # the authors evaluate the published weights on this share of the resized picture
PATCH_SHARE = 0.5
"""The weight of the maximum over the patch logits. The class token's logits have weight 1, as published."""

# The sizes that the authors' code names lvvit_t, lvvit_s and lvvit_m.
SIZES: dict[str, dict[str, Any]] = {
    "t": {"width": 240, "depth": 12, "heads": 4},
    "s": {"width": 384, "depth": 16, "heads": 6, "divisor": 2.0},
    "m": {"width": 512, "depth": 20, "heads": 8, "divisor": 2.0},
}

# Published module -> attnrx modules. If there are several, the published tensor is split by rows. {} is a layer index.
PARTS = {
    "patch_embed.proj": ("stem.projection",),
    **{f"patch_embed.conv{number}": (f"stem.convolutions.{number - 1}",) for number in (1, 2, 3)},
    **{f"patch_embed.bn{number}": (f"stem.norms.{number - 1}",) for number in (1, 2, 3)},
    "blocks.{}.norm1": ("layers.{}.attention_norm",),
    "blocks.{}.norm2": ("layers.{}.mlp_norm",),
    "blocks.{}.attn.qkv": tuple(f"layers.{{}}.attention.{part}" for part in ("scores.query", "scores.key", "value")),
    "blocks.{}.attn.proj": ("layers.{}.attention.output",),
    "blocks.{}.mlp.fc1": ("layers.{}.mlp.fc1",),
    "blocks.{}.mlp.fc2": ("layers.{}.mlp.fc2",),
    "norm": ("norm",),
    "head": ("classifier",),
    "aux_head": ("patch_classifier",),
}


@dataclass(frozen=True)
class LVViTConfig(TransformerConfig):
    """The shape and the input format of an LV-ViT.

    The outputs of the attention and of the MLP are divided by `divisor` before they are added to the residual stream.
    The paper calls this residual scaling, and the authors' code calls the divisor `skip_lam`. With `classifies_patches`
    (token labelling) a second classifier computes logits for every patch.
    """

    image_size: int = 224
    patch_size: int = 16
    classes: int = 1000
    mlp_ratio: float = 3.0
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    stem_channels: int = 64
    divisor: int | float = 1.0
    classifies_patches: bool = True

    def __post_init__(self):
        super().__post_init__()
        if self.patch_size % 2 or self.stem_channels < 1:
            raise InvalidInput(
                f"patch_size {self.patch_size} with {self.stem_channels} stem channels: the stem halves the image, "
                "so patch_size must be even; stem_channels must be 1 or more."
            )
        if not self.divisor > 0:
            raise InvalidInput(f"divisor={self.divisor}: give a positive number.")

    @classmethod
    def uniform(
        cls, form: str = "dense", *, width: int = 384, depth: int = 16, heads: int = 6, **facts: Any
    ) -> "LVViTConfig":
        """Returns the configuration of an uncompressed model with `depth` equal layers.

        As published, queries, keys and values have no bias.
        """
        # The class defaults to the ImageNet normalization, which has three channels.
        if facts.get("channels", 3) != 3:
            facts = {"mean": (0.5,) * facts["channels"], "std": (0.5,) * facts["channels"], **facts}
        spec = replace(full_spec(form, width, heads), biases=("output",))
        return cls(attention=(spec,) * depth, **facts)

    @property
    def tokens(self) -> int:
        """The number of tokens per image, which includes the class token."""
        return 1 + self.patches

    def patch_costs(self) -> PartCosts:
        """Returns the stem's costs: three convolutions with BatchNorms at half the image size, and the projection."""
        # A convolution is a linear map of the pixels under its kernel, which is applied once per output pixel.
        channels, pixels = self.stem_channels, (self.image_size // 2) ** 2
        kernels = (self.channels * 7**2, channels * 3**2, channels * 3**2)
        convolutions = (linear_costs(inputs, channels, pixels, bias=False) + norm_costs(channels) for inputs in kernels)
        projection = linear_costs(channels * (self.patch_size // 2) ** 2, self.width, self.patches)
        return sum(convolutions, start=projection)

    def costs(self, attention: tuple[AttentionSpec, ...] | None = None, tokens: TokenCosts | None = None) -> ModelCosts:
        """Returns the costs without building the model, optionally for other attention shapes and numbers of tokens.

        Patches are classified after the last layer, so pruning tokens also reduces the MACs of the patch classifier.
        """
        costs = super().costs(attention, tokens)
        costs = replace(costs, embeddings=PartCosts((1 + self.tokens) * self.width))  # class token and positions
        if not self.classifies_patches:
            return costs
        return replace(
            costs,
            classifier=costs.classifier + PartCosts((self.width + 1) * self.classes),
            # One classifier runs on the class token and the second on every patch. So there is one run per token.
            classifier_macs=costs.layers[-1].tokens * costs.classifier_macs,
        )


class Stem(nn.Module):
    """Embeds patches by four convolutions: 7 x 7 with stride 2, two of 3 x 3, and the projection to tokens.

    The first three convolutions have no bias, and BatchNorm and ReLU follow each of them. The kernel of the projection
    is half the patch size, because the first convolution halves the image.
    """

    def __init__(self, config: LVViTConfig):
        super().__init__()
        channels, half = config.stem_channels, config.patch_size // 2
        self.convolutions = nn.ModuleList(
            (
                nn.Conv2d(config.channels, channels, 7, 2, 3, bias=False),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
                nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            )
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in self.convolutions)
        self.projection = nn.Conv2d(channels, config.width, half, half)

    def forward(self, images: ImageBatch) -> Float[Tensor, "batch patches token_width"]:
        """Returns the patches, row by row."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            images = nn.functional.relu(norm(convolution(images)))
        return self.projection(images).flatten(2).transpose(1, 2)


class DividedLayer(Layer):
    """A pre-norm block whose attention and MLP outputs are divided by a constant before the residual sum."""

    def __init__(self, config: LVViTConfig, index: int):
        super().__init__(config, index)
        self.divisor = config.divisor

    def forward(self, tokens: TokenBatch) -> TokenBatch:
        tokens = tokens + self.attention(self.attention_norm(tokens)) / self.divisor
        return tokens + self.mlp(self.mlp_norm(tokens)) / self.divisor


class LVViT(Transformer[LVViTConfig]):
    """LV-ViT with one classifier for the class token and a second classifier for the patches.

    In training mode the BatchNorms of the stem use batch statistics. So training with gradient accumulation is not
    exactly equal to training with one large batch. MixToken, the paper's augmentation that mixes patches, is not
    included.
    """

    def __init__(self, config: LVViTConfig):
        super().__init__(config)
        self.class_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.positions = nn.Parameter(torch.zeros(1, config.tokens, config.width))
        self.stem = Stem(config)
        self.layers = nn.ModuleList(DividedLayer(config, index) for index in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.classifier = nn.Linear(config.width, config.classes)
        self.patch_classifier = nn.Linear(config.width, config.classes) if config.classifies_patches else None

    def logits(self, images: ImageBatch) -> Logits:
        """Returns the class token's logits plus, for each class, half of the largest logit over the patches."""
        logits, patches = self.answers(images)
        return logits if patches is None else logits + PATCH_SHARE * patches.amax(1)

    def answers(self, images: ImageBatch) -> tuple[Logits, Float[Tensor, "batch patches classes"] | None]:
        """Returns the class token's logits and the remaining patches' logits, for training with token labels.

        If tokens are pruned by a mask, a pruned patch has the same logits as one of the remaining patches.
        """
        require_images(images, self.config.input_shape, "this model")
        patches = self.stem(images)
        tokens = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        # [batch, 1 + remaining patches, width]. After the norm, the token policy's hook overwrites masked patches.
        tokens = self.norm(tokens)
        logits = self.classifier(tokens[:, 0])
        return logits, None if self.patch_classifier is None else self.patch_classifier(tokens[:, 1:])


class LVViTFamily(AttnrxFamily[LVViTConfig]):
    """The family of the models `lvvit:t`, `lvvit:s` and `lvvit:m`."""

    name = "lvvit"
    model_type = LVViT
    config_type = LVViTConfig
    takes_weights = True

    def names(self) -> tuple[str, ...]:
        return tuple(f"lvvit:{size}" for size in SIZES)

    def config(self, name: str, **changes: Any) -> LVViTConfig:
        return lvvit_config(name.removeprefix("lvvit:"), **changes)

    def load(self, name: str, weights: Path | str, **changes: Any) -> LVViT:
        """Loads a published weight file (safetensors or a torch checkpoint) into a new model in evaluation mode.

        The model uses the published preprocessing: bicubic resizing and a crop of 0.9. `changes` override fields of the
        configuration, e.g. `image_size=384` for weights trained at that size.

        Raises:
            CheckpointError: The file is not a weight file, or a tensor in the file or the model has no counterpart. The
                message names the tensor.
        """
        config = self.config(name, **changes)
        if config.geometry is None:
            config = replace(config, geometry=published_geometry(config.image_size, config.channels))
        with torch.device("meta"):  # all weights come from the file
            model = LVViT(config)
        path = Path(weights)
        tensors = read_weight_file(path)
        require_finite_tensors(tensors, str(path))
        named = renamed(tensors, model, f"the weights in {path} do not fit {name}")
        model.load_state_dict(named, strict=True, assign=True)
        return model.requires_grad_(True).eval()

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        return self._transformer(model).get_submodule("stem")

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns a layout with a class token before the patches. If patches are classified, the pooling is "max"."""
        config = self._transformer(model).config
        pooled = "max" if config.classifies_patches else "class"
        return TokenLayout(1, config.patches, class_token=True, pooled=pooled)


def lvvit_config(size: str, **changes: Any) -> LVViTConfig:
    """Returns the configuration `lvvit:SIZE`. `changes` override its form, width, depth, heads and other fields.

    Raises:
        UnknownName: There is no such size.
    """
    if size not in SIZES:
        raise UnknownName("size of LV-ViT", size, SIZES)
    return LVViTConfig.uniform(**{**SIZES[size], **changes})


def published_geometry(side: int, channels: int = 3) -> ImageGeometry:
    """Returns the preprocessing of the authors' evaluation: bicubic resizing to side / 0.9, then a center crop."""
    resized = int(side / CROP)  # timm's rounding: 248 for 224
    return ImageGeometry((side, side), channels, "shortest_edge", (resized, resized), "bicubic")


def renamed(tensors: Mapping[str, Tensor], model: LVViT, problem: str) -> dict[str, Tensor]:
    """Renames published tensors to attnrx's parameter names. Every tensor on either side must have a counterpart.

    Raises:
        CheckpointError: A tensor has no counterpart or another shape.
    """
    state_dict, names = model.state_dict(), published_names(model)
    missing, unknown = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or unknown:
        raise CheckpointError(f"{problem}: missing are {_listed(missing)}; not known are {_listed(unknown)}.")
    state: dict[str, Tensor] = {}
    for published, targets in names.items():
        expected, tensor = [state_dict[target] for target in targets], tensors[published]
        # The published tensor stacks several targets by rows. The num_batches_tracked of a BatchNorm is a scalar.
        shape = (sum(len(part) for part in expected), *expected[0].shape[1:]) if expected[0].ndim else ()
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{problem}: {published} has the shape {tuple(tensor.shape)}, and {shape} is wanted.")
        split = tensor.split([len(part) for part in expected]) if len(targets) > 1 else (tensor,)
        # Tensors are cloned, because the parts of a fused projection would otherwise share one storage.
        state |= {target: part.clone() for target, part in zip(targets, split, strict=True)}
    return state


def published_names(model: LVViT) -> dict[str, tuple[str, ...]]:
    """Maps the name of every published tensor to the attnrx parameters that the tensor contains."""
    parameters = model.state_dict().keys()
    names: dict[str, tuple[str, ...]] = {"cls_token": ("class_token",), "pos_embed": ("positions",)}
    for layer in range(model.config.depth):
        for published, targets in PARTS.items():
            for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
                paths = tuple(f"{target.format(layer)}.{kind}" for target in targets)
                if paths[0] in parameters:  # a module has only some kinds of tensors
                    names[f"{published.format(layer)}.{kind}"] = paths
    return names


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "none"


FAMILIES.register(LVViTFamily())
