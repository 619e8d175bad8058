"""Small models as users have them: with adapters and masks, of structures that no library has, with several towers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

timm = pytest.importorskip("timm")
SIZE, WIDTH, CLASSES = 32, 24, 5


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


# Adapters, masks and norms of weights.


def lora(**options: Any) -> Any:
    return pytest.importorskip("peft").LoraConfig(r=2, init_lora_weights=False, **options)


def peft_of(model: nn.Module, **options: Any) -> Any:
    return pytest.importorskip("peft").get_peft_model(model, lora(**options))


def peft_transformers() -> nn.Module:
    return peft_of(of_transformers(), target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])


def peft_dora() -> nn.Module:
    return peft_of(of_timm(), target_modules=["qkv", "fc1"], use_dora=True)


def add_adapter() -> nn.Module:
    model = of_transformers()
    pytest.importorskip("peft")
    model.add_adapter(lora(target_modules=["q_proj", "fc1"]))
    return model


class Decoder(nn.Module):
    """A map of the patches of a backbone with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = peft_of(of_transformers("Dinov2Model"), target_modules=["q_proj", "v_proj"])
        self.decoder = nn.ConvTranspose2d(WIDTH, 1, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.backbone(images).last_hidden_state[:, 1:]
        return self.decoder(tokens.mT.unflatten(2, (images.shape[2] // 8, -1)))


class LoraQKV(nn.Module):
    """Adapters of queries and values around a fused projection, as published for SAM and DINOv2."""

    def __init__(self, qkv: nn.Linear, rank: int = 2):
        super().__init__()
        self.qkv, self.dim = qkv, qkv.in_features
        self.a_q, self.a_v = (nn.Linear(self.dim, rank, bias=False) for _ in range(2))
        self.b_q, self.b_v = (nn.Linear(rank, self.dim, bias=False) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        qkv = self.qkv(tokens)
        qkv[:, :, : self.dim] += self.b_q(self.a_q(tokens))
        qkv[:, :, -self.dim :] += self.b_v(self.a_v(tokens))
        return qkv


class LoraLinear(nn.Linear):
    """A subclass of the linear map, with a low-rank part."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__(base.in_features, base.out_features)
        self.load_state_dict(base.state_dict())
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features)),
            nn.Parameter(torch.randn(base.out_features, rank)),
        )

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.5 * F.linear(F.linear(input, self.a), self.b)


def own_lora() -> nn.Module:
    model = of_timm()
    for block in model.blocks:
        block.attn.qkv = LoraQKV(block.attn.qkv)
        block.mlp.fc1 = LoraLinear(block.mlp.fc1)
    return model


def linear_maps(model: nn.Module) -> list[nn.Linear]:
    return [part for part in model.modules() if type(part) is nn.Linear]


def weight_normed() -> nn.Module:
    model = of_timm()
    for part in linear_maps(model):
        parametrizations.weight_norm(part)
    return model


def old_weight_norm() -> nn.Module:
    model = of_transformers("Dinov2ForImageClassification")
    for part in linear_maps(model)[:6]:
        nn.utils.weight_norm(part)
    return model


def pruned() -> nn.Module:
    model = nn.Sequential(of_timm(num_classes=0), nn.Linear(WIDTH, CLASSES))
    for part in linear_maps(model):
        prune.l1_unstructured(part, "weight", 0.3)
    return model


def normed_head() -> nn.Module:
    """The head of DINO: features of unit length, and a last map of unit rows."""
    return nn.Sequential(
        of_timm(num_classes=0), nn.Linear(WIDTH, 16), nn.GELU(),
        parametrizations.weight_norm(nn.Linear(16, CLASSES, bias=False)),
    )  # fmt: skip


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


class MaskedAutoencoder(timm.models.vision_transformer.VisionTransformer):
    """A subclass with methods of its own."""

    def __init__(self) -> None:
        super().__init__(img_size=SIZE, patch_size=8, embed_dim=WIDTH, depth=3, num_heads=2, num_classes=0)
        self.decoder = nn.Linear(WIDTH, 192)

    def encode(self, images: Tensor) -> Tensor:
        return self.forward_features(images)[:, 1:]

    def forward(self, images: Tensor) -> Tensor:
        return self.decoder(self.encode(images))


class Named(nn.Module):
    """A dictionary, and a second argument that is optional."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.head = of_timm(num_classes=0), nn.Linear(WIDTH, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.vit(pixel_values))
        return {"loss": None if labels is None else F.cross_entropy(logits, labels), "logits": logits}


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
    is_slow: bool = False


CASES: dict[str, Case] = {
    "LoRA of PEFT, transformers": Case(peft_transformers, is_slow=True, needs_factory=False),
    "DoRA of PEFT, timm": Case(peft_dora, is_slow=True, needs_factory=False),
    "LoRA by add_adapter": Case(add_adapter, is_slow=True, needs_factory=False),
    "LoRA of PEFT in a module": Case(Decoder, is_slow=True),
    "own LoRA": Case(own_lora, needs_factory=False),
    "weight norm": Case(weight_normed, needs_factory=False),
    "old weight norm": Case(old_weight_norm, is_slow=True, needs_factory=False),
    "pruned in a sequence": Case(pruned),
    "head of DINO": Case(normed_head),
    "TimmWrapper": Case(wrapped_timm),
    "EMA": Case(Ema),
    "ModelEmaV3": Case(lambda: timm.utils.ModelEmaV3(of_timm())),
    "own methods": Case(MaskedAutoencoder),
    "dictionary": Case(Named),
}


def made(name: str) -> Any:
    """Returns the model of a case, every weight drawn anew, in evaluation mode and double precision."""
    torch.manual_seed(0)
    model = CASES[name].make().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Heads and adapters start at zero; norms of weights stay positive.
            scale = parameter.abs() if key.endswith(("original0", "weight_g", "magnitude_vector.default.weight")) else 0
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + scale)
    return model.eval()
