"""Small models as users have them: with other heads, of structures that no library has, with several towers."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

timm = pytest.importorskip("timm")
SIZE, WIDTH, CLASSES = 32, 24, 5
IDS = torch.tensor([[3, 7, 29, 0]] * 5)


def of_timm(**options: Any) -> Any:
    sizes: dict[str, Any] = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **{"num_classes": CLASSES, **sizes, **options})


def of_transformers(kind: str = "ViTForImageClassification", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    if not kind.startswith("Dinov2"):
        sizes["intermediate_size"] = 48
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**sizes, image_size=SIZE, num_labels=CLASSES, **options))


# Heads and parts of the user's own.


def of_torchvision(**options: Any) -> Any:
    models = pytest.importorskip("torchvision.models")
    sizes: dict[str, Any] = {"image_size": SIZE, "patch_size": 8, "num_layers": 3, "num_heads": 2, "hidden_dim": WIDTH}
    return models.VisionTransformer(**sizes, mlp_dim=48, num_classes=CLASSES, **options)


def new_head_of_torchvision() -> nn.Module:
    model = of_torchvision()
    model.heads.head = nn.Linear(WIDTH, 7)
    return model


def no_head_of_torchvision() -> nn.Module:
    model = of_torchvision()
    model.heads = nn.Identity()
    return model


class TwoHeads(nn.Module):
    """Classes, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.classes, self.age = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.classes(features), self.age(features).squeeze(-1)


def two_heads() -> nn.Module:
    model = of_timm()
    model.head = TwoHeads()
    return model


class Detector(nn.Module):
    """Classes and boxes of a few queries that attend to the patches of a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = of_transformers("Dinov2Model")
        self.queries = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 48, dropout=0.0, batch_first=True)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, pixel_values: Tensor, targets: Any = None) -> dict[str, Tensor]:
        patches = self.backbone(pixel_values).last_hidden_state[:, 1:]
        queries = self.decoder(self.queries.expand(len(patches), -1, -1), patches)
        return {"logits": self.classes(queries), "boxes": self.boxes(queries).sigmoid()}


class Depth(nn.Module):
    """A map of numbers from the features after two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = of_timm(num_classes=0)
        self.decoder = nn.Sequential(nn.Conv2d(2 * WIDTH, 8, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 8, 8))

    def forward(self, images: Tensor) -> Tensor:
        features = self.encoder.get_intermediate_layers(images, (1, 2), reshape=True)
        return self.decoder(torch.cat(features, 1)).squeeze(1)


def windowed_detector(name: str, windows: dict[str, Any], **options: Any) -> Any:
    """LwDetr or RfDetr, whose blocks are called with 2 x 2 windows, and attend to each or to all of them."""
    transformers = pytest.importorskip("transformers")
    backbone = getattr(transformers, f"{name}ViTConfig" if name == "LwDetr" else f"{name}Dinov2Config")(
        hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, mlp_ratio=2, image_size=SIZE, patch_size=8,
        out_indices=[1, 3], **windows,
    )  # fmt: skip
    sizes: dict[str, Any] = {"decoder_self_attention_heads": 2, "decoder_cross_attention_heads": 2, "group_detr": 1}
    config = getattr(transformers, f"{name}Config")(
        backbone_config=backbone, d_model=16, decoder_layers=1, decoder_ffn_dim=32, num_queries=6, num_labels=CLASSES,
        **sizes, **options,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForObjectDetection")(config)


def lw_detr() -> Any:
    windows = {"num_windows": 4, "window_block_indices": [0, 2], "pretrain_image_size": SIZE}
    return windowed_detector("LwDetr", windows, projector_scale_factors=[1.0])


def rf_detr() -> Any:
    return windowed_detector("RfDetr", {"num_windows": 2, "window_block_indexes": [0, 1]})


def in_grids(kind: str, side: int, **fields: Any) -> Any:
    """A model of transformers whose blocks attend to windows of this side in a grid of 4 x 4 patches."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**sizes, image_size=SIZE, window_size=side, **fields))


def sam(side: int) -> Any:
    return in_grids("SamVisionModel", side, global_attn_indexes=[1], output_channels=8, mlp_dim=48)


def vitdet() -> Any:
    fields = {"window_block_indices": [0, 2], "pretrain_image_size": SIZE, "mlp_ratio": 2, "out_indices": [2, 3]}
    return in_grids("VitDetBackbone", 3, use_relative_position_embeddings=True, **fields)


def timm_sam() -> Any:
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 2, "neck_chans": 8}
    windows = {"window_size": 3, "global_attn_indexes": (1,)}
    return timm.create_model("samvit_base_patch16", num_classes=CLASSES, **sizes, **windows)


def feature_maps(model: Any) -> Callable[[Tensor], Any]:
    return lambda images: model(images).feature_maps


def detections(model: Any) -> Callable[[Tensor], dict[str, Tensor]]:
    def of_images(images: Tensor) -> dict[str, Tensor]:
        outputs = model(images)
        return {"logits": outputs["logits"], "pred_boxes": outputs["pred_boxes"]}

    return of_images


# Structures without a library.


class OfEncoder(nn.Module):
    """A Vision Transformer around nn.TransformerEncoder, with its dropout of 0.1."""

    def __init__(self, batch_first: bool = True, **options: Any):
        super().__init__()
        self.embed, self.batch_first = nn.Conv2d(3, WIDTH, 8, 8), batch_first
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIZE // 8) ** 2 + 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=batch_first, **options)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.positions
        tokens = self.encoder(tokens) if self.batch_first else self.encoder(tokens.transpose(0, 1)).transpose(0, 1)
        return self.head(self.norm(tokens[:, 0]))


class OfLayers(nn.Module):
    """nn.TransformerEncoderLayer in a list, with norms after its sublayers, and a map of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.positions = nn.Parameter(torch.randn(1, (SIZE // 8) ** 2, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True, activation="gelu") for _ in range(3)
        )
        self.decoder = nn.Linear(WIDTH, 64)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        tokens = self.embed(images).flatten(2).mT + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        return {"map": self.decoder(tokens), "mean": tokens.mean(1)}


class Attention(nn.Module):
    """The attention of timm, DINO and MAE."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.attn_drop((self.scale * q @ k.mT).softmax(-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """Two maps with an activation."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2, self.drop = (
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, width),
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class NestedBlock(nn.Module):
    """A block that takes one batch of tokens, or a list of several."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width), Attention(width, heads), Scale(width)
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(width), Mlp(width, 2 * width), Scale(width)

    def one(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))

    def forward(self, x_or_list: Any) -> Any:
        if isinstance(x_or_list, Tensor):
            return self.one(x_or_list)
        return [self.one(x) for x in x_or_list]


class Chunk(nn.ModuleList):
    def forward(self, x: Any) -> Any:
        for block in self:
            x = block(x)
        return x


class PatchEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_size, self.proj, self.norm = (8, 8), nn.Conv2d(3, WIDTH, 8, 8), nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(self.proj(images).flatten(2).mT)


class DinoVisionTransformer(nn.Module):
    """The structure of DINOv2's own repository: blocks in chunks, with identities in the places of earlier ones."""

    def __init__(self, chunks: int = 2, depth: int = 4, registers: int = 2):
        super().__init__()
        self.embed_dim, self.registers = WIDTH, registers
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (SIZE // 8) ** 2, WIDTH))
        self.register_tokens = nn.Parameter(torch.zeros(1, registers, WIDTH))
        blocks, size = [NestedBlock(WIDTH, 3) for _ in range(depth)], depth // chunks
        self.chunked_blocks = chunks > 1
        self.blocks = nn.ModuleList(
            [Chunk([*[nn.Identity()] * start, *blocks[start : start + size]]) for start in range(0, depth, size)]
            if self.chunked_blocks
            else blocks
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Identity()
        self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        x = self.patch_embed(x)
        if masks is not None:
            x = torch.where(masks.unsqueeze(-1), self.mask_token.unsqueeze(0), x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        return torch.cat([x[:, :1], self.register_tokens.expand(x.shape[0], -1, -1), x[:, 1:]], 1)

    def forward_features(self, x: Tensor, masks: Tensor | None = None) -> dict[str, Any]:
        x = self.prepare_tokens_with_masks(x, masks)
        for block in self.blocks:
            x = block(x)
        normed, first = self.norm(x), 1 + self.registers
        return {
            "x_norm_clstoken": normed[:, 0], "x_norm_regtokens": normed[:, 1:first],
            "x_norm_patchtokens": normed[:, first:], "x_prenorm": x, "masks": masks,
        }  # fmt: skip

    def forward(self, *args: Any, is_training: bool = False, **kwargs: Any) -> Any:
        features = self.forward_features(*args, **kwargs)
        return features if is_training else self.head(features["x_norm_clstoken"])


class LucidAttention(nn.Module):
    """The attention of vit-pytorch: a norm inside, one map without biases, an output in a sequence with a dropout."""

    def __init__(self, dim: int, heads: int, dim_head: int):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend, self.dropout = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        weights = self.dropout(self.attend(q @ k.transpose(-1, -2) * self.scale))
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        maps = nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim), nn.Dropout(0.1)
        self.net = nn.Sequential(nn.LayerNorm(dim), *maps)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LucidTransformer(nn.Module):
    """Pairs of attention and feed-forward in a list of lists, which the forward unpacks."""

    def __init__(self, dim: int, depth: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(nn.ModuleList([LucidAttention(dim, 3, 8), FeedForward(dim, 2 * dim)]))

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:  # type: ignore[misc]
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class Patches(nn.Module):
    """Pixels of a patch in a row."""

    def forward(self, images: Tensor) -> Tensor:
        return images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).flatten(1, 2).flatten(2)


class LucidViT(nn.Module):
    """The structure of vit-pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(
            Patches(), nn.LayerNorm(192), nn.Linear(192, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.pos_embedding = nn.Parameter(torch.randn(1, (SIZE // 8) ** 2 + 1, WIDTH))
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.transformer = LucidTransformer(WIDTH, 3)
        self.to_latent, self.mlp_head = nn.Identity(), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch_embedding(images)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1)
        x = self.transformer(self.dropout(x + self.pos_embedding))
        return self.mlp_head(self.to_latent(x[:, 0]))


class Separate(nn.Module):
    """An own model with four projections per attention, and the norm of the block inside a residual branch."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = Separate.Heads()
            self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 48), nn.ReLU(), nn.Linear(48, WIDTH))

        def forward(self, tokens: Tensor) -> Tensor:
            tokens = tokens + self.attention(self.ln_1(tokens))
            return tokens + self.feed_forward(self.ln_2(tokens))

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n_heads = 4
            self.q_lin, self.k_lin, self.v_lin, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, tokens: Tensor) -> Tensor:
            q, k, v = (
                part(tokens).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                for part in (self.q_lin, self.k_lin, self.v_lin)
            )
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIZE // 8) ** 2, WIDTH))
        self.body = nn.Sequential(*(Separate.Layer() for _ in range(3)))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.stem(images).flatten(2).mT + self.positions
        tokens = torch.cat([self.cls.expand(len(images), -1, -1), patches], 1)
        return self.classifier(self.body(tokens)[:, 0])


# Wrappers, and several towers.


class Ema(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.decay = of_timm(), 0.99
        self.register_buffer("updates", torch.tensor(0))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
            own.lerp_(other, 1 - self.decay)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def clip() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**sizes, "vocab_size": 30, "max_position_embeddings": 8, "eos_token_id": 29},
            vision_config={**sizes, "image_size": SIZE, "patch_size": 8, "num_hidden_layers": 3}, projection_dim=16,
        )
    )  # fmt: skip


class VisionLanguage(nn.Module):
    """Patch features as the first tokens of a text model, as in LLaVA."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = of_transformers("Dinov2Model")
        self.projector, self.words = nn.Linear(WIDTH, 16), nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.language_model = nn.TransformerEncoder(layer, 2)
        self.lm_head = nn.Linear(16, 30)

    def get_image_features(self, pixel_values: Tensor) -> Tensor:
        return self.projector(self.vision_tower(pixel_values).last_hidden_state[:, 1:])

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        tokens = self.words(input_ids)
        if pixel_values is not None:
            tokens = torch.cat([self.get_image_features(pixel_values), tokens], 1)
        return self.lm_head(self.language_model(tokens))


class TwoCrops(nn.Module):
    """Two crops of every image through one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = of_timm(num_classes=0), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.cat([self.tower(images), self.tower(images.roll(5, -1))], 1))


class TwoTowers(nn.Module):
    """The features of two towers of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = of_timm(num_classes=0, embed_dim=12), of_timm(num_classes=0)
        self.head = nn.Linear(12 + WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.cat([self.small(images), self.large(images)], -1))


class Student(nn.Module):
    """A student and its frozen teacher, which is no part of the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = of_timm(), of_timm().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        return self.student(images)


class Around(nn.Module):
    """A Vision Transformer that is called by a function of its user."""

    def __init__(self, run: Callable[[Any, Tensor], Any], **options: Any):
        super().__init__()
        self.run, self.net, self.head = run, of_timm(**{"num_classes": 0, **options}), nn.Linear(WIDTH, CLASSES)
        self.prompts, self.bands = nn.Parameter(torch.randn(3, 2, WIDTH)), nn.Conv2d(6, 3, 1)

    def forward(self, images: Tensor) -> Any:
        return self.run(self, images)


def wrapped_timm() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
    config = transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224", num_labels=CLASSES, model_args=sizes, do_pooling=True
    )
    return transformers.TimmWrapperForImageClassification(config)


@dataclass(frozen=True)
class Case:
    """A model of a user's: how it is made, the axes of it that can be smaller, whether loading a folder needs the
    function that makes it, what of it takes images alone, and whether it takes longer (importing PEFT takes seconds).
    """

    make: Callable[[], Any]
    axes: str = "qk vo hidden tokens"
    needs_factory: bool = True
    of_images: Callable[[Any], Any] = lambda model: model
    call: Callable[[Any, Tensor], Any] | None = None  # with its own arguments
    is_slow: bool = False


CASES: dict[str, Case] = {
    "new head, torchvision": Case(new_head_of_torchvision, needs_factory=False),
    "no head, torchvision": Case(no_head_of_torchvision, needs_factory=False),
    "two heads": Case(two_heads),
    "detector": Case(Detector, needs_factory=False),
    "depth": Case(Depth, needs_factory=False),
    "LW-DETR": Case(lw_detr, needs_factory=False, of_images=detections),
    "SAM, a border of zeros": Case(partial(sam, 3), needs_factory=False),
    "SAM of timm": Case(timm_sam, needs_factory=False),
    "ViTDet": Case(vitdet, needs_factory=False),
    "RF-DETR": Case(rf_detr, needs_factory=False, of_images=detections),
    "encoder of torch": Case(lambda: OfEncoder(norm_first=True, activation="gelu")),
    "encoder of torch, tokens first": Case(lambda: OfEncoder(batch_first=False, dropout=0.0)),
    "layers of torch": Case(OfLayers, needs_factory=False),
    "DINOv2's repository": Case(DinoVisionTransformer, needs_factory=False),
    "vit-pytorch": Case(LucidViT, needs_factory=False),
    "four projections": Case(Separate, needs_factory=False),
    "TimmWrapper": Case(wrapped_timm, needs_factory=False),
    "EMA": Case(Ema, needs_factory=False),
    "CLIP": Case(
        clip,
        needs_factory=False,
        of_images=lambda model: lambda images: model.get_image_features(images).pooler_output,
        call=lambda model, images: model(input_ids=IDS, pixel_values=images).logits_per_image,
    ),
    "vision-language": Case(
        VisionLanguage,
        needs_factory=False,
        of_images=lambda model: model.get_image_features,
        call=lambda model, images: model(IDS, images),
    ),
    "two crops": Case(TwoCrops, needs_factory=False),
    "two towers": Case(TwoTowers, needs_factory=False),
    "student and teacher": Case(Student, needs_factory=False),
}


def made(name: str) -> Any:
    """Returns the model of a case, every weight drawn anew, in evaluation mode and double precision."""
    torch.manual_seed(0)
    model = CASES[name].make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))  # heads start at zero
    return model.eval()
