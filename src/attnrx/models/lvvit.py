"""LV-ViT (Jiang et al., 2021, All Tokens Matter): a convolutional stem, and a second classifier for the patches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from attnrx.errors import InvalidInput
from attnrx.models.chunked_forward import chunked_forward
from attnrx.models.transformer import Layer, Transformer, TransformerConfig
from attnrx.shapes import Float, Tensor
from attnrx.spec import AttentionSpec

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PATCH_SHARE = 0.5
"""Weight of the maximum over the patch logits; the class token's logits have weight 1, as published."""


@dataclass(frozen=True)
class LVViTConfig(TransformerConfig):
    """The shape of the model and its input format.

    The output of attention and MLP is divided by `divisor` before the residual sum (the residual scaling of the paper,
    `skip_lam` in its code). With `classifies_patches` (token labelling) a second classifier computes logits for every
    patch.
    """

    image_size: int = 224
    patch_size: int = 16
    channels: int = 3
    classes: int = 1000
    mlp_ratio: float = 3.0
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    mlp_ranks: tuple[tuple[int | None, int | None], ...] = ()
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
        """Returns the uncompressed model of `depth` equal layers, with no bias in queries, keys and values, as
        published.
        """
        full = AttentionSpec.full(form, width, heads)
        if facts.get("channels", 3) != 3:
            facts = {"mean": (0.5,) * facts["channels"], "std": (0.5,) * facts["channels"], **facts}
        return cls(attention=(_unbiased(full),) * depth, **facts)

    @property
    def tokens(self) -> int:
        """Tokens of an image: the class token and the patches."""
        return 1 + self.patches


def _unbiased(spec: AttentionSpec) -> AttentionSpec:
    return AttentionSpec(**{**vars(spec), "biases": ("output",)})


class Stem(nn.Module):
    """Four convolutions from an image to its patches: 7 x 7 with stride 2, two of 3 x 3, and the projection.

    The first three have no bias and are followed by BatchNorm and ReLU. The projection uses half the patch size,
    because the stem halves the image.
    """

    def __init__(self, config: LVViTConfig):
        super().__init__()
        own, half = config.stem_channels, config.patch_size // 2
        self.convolutions = nn.ModuleList(
            (
                nn.Conv2d(config.channels, own, 7, 2, 3, bias=False),
                nn.Conv2d(own, own, 3, 1, 1, bias=False),
                nn.Conv2d(own, own, 3, 1, 1, bias=False),
            )
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(own) for _ in self.convolutions)
        self.projection = nn.Conv2d(own, config.width, half, half)

    def forward(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch patches token_width"]:
        """Returns the patches, row by row."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            images = nn.functional.relu(norm(convolution(images)))
        return self.projection(images).flatten(2).transpose(1, 2)


class DividedLayer(Layer):
    """A pre-norm block whose attention and MLP outputs are divided by a constant before the residual sum."""

    def __init__(self, config: LVViTConfig, index: int):
        super().__init__(config.attention[index], config.hidden, config.mlp_rank(index))
        self.divisor = config.divisor

    def forward(self, tokens: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        """Adds attention and MLP, divided, to the residual stream."""
        tokens = tokens + self.attention(self.attention_norm(tokens)) / self.divisor
        return tokens + self.mlp(self.mlp_norm(tokens)) / self.divisor


class LVViT(Transformer[LVViTConfig]):
    """Stem, class token, learned position embeddings, layers, and a classifier each for the class token and the
    patches.

    In training mode the BatchNorms of the stem use statistics of the batch, so gradient accumulation is not exactly
    equal to one large batch. The paper's augmentation that mixes patches (MixToken) is not part of the model.
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

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the logits: those of the class token plus half of the maximum over the patches, class by class."""
        self.require_images(images)
        return chunked_forward(self, self.logits, images, self.config.patches * self.config.hidden)

    def logits(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch classes"]:
        """Returns the logits of images of the right shape."""
        logits, patches = self.answers(images)
        return logits if patches is None else logits + PATCH_SHARE * patches.amax(1)

    def answers(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch patches classes"] | None]:
        """Returns the logits of the class token and of the remaining patches, for training with token labels.

        Where tokens are pruned by a mask, the logits of a pruned patch equal those of a remaining one.
        """
        self.require_images(images)
        patches = self.stem(images)
        tokens = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        tokens = self.norm(tokens)
        logits = self.classifier(tokens[:, 0])
        return logits, None if self.patch_classifier is None else self.patch_classifier(tokens[:, 1:])
