"""LV-ViT: the published model from its published names, refusals, tokens that leave, training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.storage import write_tensors
from attnrx.training import train
from attnrx.vit.models import attach_tokens_, build_model, family_of, recording_tokens
from attnrx.vit.tokens import TokenPolicy
from attnrx_lab.lvvit import SIZES, LVViT, LVViTConfig, LVViTFamily, published_geometry, published_names
from attnrx_lab.tokens import Random
from attnrx_lab.vision_transformer import initialize_
from support.cases import LVVITS, images, own
from support.tiny_runs import at, config, same, splits

SMALL = {"width": 12, "depth": 2, "heads": 3, "image_size": 32, "classes": 5, "stem_channels": 4}
WIDTH, DEPTH, HEADS, CLASSES, STEM = 12, 2, 3, 5, 4
STATISTICS = ("running_mean", "running_var", "weight", "bias")
Tensors = dict[str, torch.Tensor]


def published() -> Tensors:
    """Random tensors with the names and shapes of the authors' code."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, WIDTH),
        "pos_embed": (1, 5, WIDTH),
        "patch_embed.conv1.weight": (STEM, 3, 7, 7),
        "patch_embed.conv2.weight": (STEM, STEM, 3, 3),
        "patch_embed.conv3.weight": (STEM, STEM, 3, 3),
        "patch_embed.proj.weight": (WIDTH, STEM, 8, 8),
        "patch_embed.proj.bias": (WIDTH,),
    }
    for number in (1, 2, 3):
        shapes |= {f"patch_embed.bn{number}.{kind}": (STEM,) for kind in ("weight", "bias")}
        shapes |= {f"patch_embed.bn{number}.running_{kind}": (STEM,) for kind in ("mean", "var")}
    for layer in range(DEPTH):
        at = f"blocks.{layer}"
        shapes |= {f"{at}.{norm}.{kind}": (WIDTH,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
        shapes |= {f"{at}.attn.qkv.weight": (3 * WIDTH, WIDTH), f"{at}.attn.proj.weight": (WIDTH, WIDTH)}
        shapes |= {f"{at}.mlp.fc1.weight": (3 * WIDTH, WIDTH), f"{at}.mlp.fc1.bias": (3 * WIDTH,)}
        shapes |= {f"{at}.mlp.fc2.weight": (WIDTH, 3 * WIDTH), f"{at}.mlp.fc2.bias": (WIDTH,)}
        shapes |= {f"{at}.attn.proj.bias": (WIDTH,)}
    shapes |= {"norm.weight": (WIDTH,), "norm.bias": (WIDTH,)}
    for head in ("head", "aux_head"):
        shapes |= {f"{head}.weight": (CLASSES, WIDTH), f"{head}.bias": (CLASSES,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for number in (1, 2, 3):
        tensors[f"patch_embed.bn{number}.running_var"].abs_().add_(0.5)
        tensors[f"patch_embed.bn{number}.num_batches_tracked"] = torch.tensor(7)
    return tensors


def as_written(given: Tensors, pictures: torch.Tensor, divisor: float) -> torch.Tensor:
    """The paper's model, written down once more from the published tensors."""
    for number, stride, padding in ((1, 2, 3), (2, 1, 1), (3, 1, 1)):
        at = f"patch_embed.bn{number}"
        mean, variance, weight, bias = (given[f"{at}.{kind}"] for kind in STATISTICS)
        pictures = F.conv2d(pictures, given[f"patch_embed.conv{number}.weight"], None, stride, padding)
        pictures = F.relu(F.batch_norm(pictures, mean, variance, weight, bias))
    patches = F.conv2d(pictures, given["patch_embed.proj.weight"], given["patch_embed.proj.bias"], 8)
    patches = patches.flatten(2).mT
    tokens = torch.cat([given["cls_token"].expand(len(patches), 1, WIDTH), patches], 1) + given["pos_embed"]

    def linear(name: str, features: torch.Tensor) -> torch.Tensor:
        return F.linear(features, given[f"{name}.weight"], given.get(f"{name}.bias"))

    def norm_of(name: str, features: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(features, (WIDTH,), given[f"{name}.weight"], given[f"{name}.bias"])

    for layer in range(DEPTH):
        at = f"blocks.{layer}"
        fused = linear(f"{at}.attn.qkv", norm_of(f"{at}.norm1", tokens))
        query, key, value = fused.unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = (query @ key.mT * (WIDTH // HEADS) ** -0.5).softmax(-1) @ value
        tokens = tokens + linear(f"{at}.attn.proj", mixed.transpose(1, 2).flatten(2)) / divisor
        hidden = F.gelu(linear(f"{at}.mlp.fc1", norm_of(f"{at}.norm2", tokens)))
        tokens = tokens + linear(f"{at}.mlp.fc2", hidden) / divisor
    tokens = norm_of("norm", tokens)
    return linear("head", tokens[:, 0]) + 0.5 * linear("aux_head", tokens[:, 1:]).max(1).values


def pictures() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def plain(tensors: Tensors, path: Path) -> None:
    torch.save(tensors, path)


def wrapped(tensors: Tensors, path: Path) -> None:
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()}, "epoch": 3}, path)


def safe(tensors: Tensors, path: Path) -> None:
    write_tensors(path, tensors)


FILES = [("weights.safetensors", safe), ("lvvit.pth", plain), ("lvvit.pth.tar", wrapped)]


@pytest.mark.parametrize(("file", "write"), FILES)
@pytest.mark.parametrize("size", ["t", "s"])
def test_published_weights_give_the_published_model(
    size: str, file: str, write: Callable[[Tensors, Path], None], tmp_path: Path
) -> None:
    if write is not safe:
        pytest.importorskip("timm")
    write(published(), tmp_path / file)
    model = LVViTFamily().load(f"lvvit:{size}", tmp_path / file, **SMALL)
    divisor = {"t": 1.0, "s": 2.0}[size]
    with torch.no_grad():
        torch.testing.assert_close(
            model(pictures()), as_written(published(), pictures(), divisor), rtol=1e-12, atol=1e-12
        )
    assert not model.training and not any(parameter.is_meta for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_every_tensor_of_every_size_has_a_counterpart() -> None:
    for size in SIZES:
        with torch.device("meta"):
            model = build_model(f"lvvit:{size}")
        assert isinstance(model, LVViT)
        names = published_names(model)
        held = [own for parts in names.values() for own in parts]
        assert sorted(held) == sorted(model.state_dict())
        assert "blocks.0.attn.qkv.bias" not in names


def renamed_head(tensors: Tensors) -> Tensors:
    return {name.replace("aux_head", "other_head"): tensor for name, tensor in tensors.items()}


def with_nan(tensors: Tensors) -> Tensors:
    tensors["head.weight"][0, 0] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda given: {**given, "pos_embed": torch.zeros(1, 10, WIDTH)}, r"pos_embed has the shape \(1, 10, 12\)"),
        (lambda given: {**given, "blocks.0.attn.qkv.weight": torch.zeros(24, WIDTH)}, r"\(36, 12\) is wanted"),
        (lambda given: {**given, "blocks.0.attn.qkv.bias": torch.zeros(36)}, "not known are blocks.0.attn.qkv.bias"),
        (lambda given: {**given, "blocks.2.norm1.bias": torch.zeros(WIDTH)}, "not known are blocks.2.norm1.bias"),
        (lambda given: {name: given[name] for name in given if "num_batches" not in name}, "missing are patch_embed"),
        (renamed_head, "missing are aux_head.bias, aux_head.weight; not known are other_head.bias"),
        (with_nan, "NaN or infinity in 'head.weight'"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(
    damage: Callable[[Tensors], Tensors], said: str, tmp_path: Path
) -> None:
    safe(damage(published()), tmp_path / "weights.safetensors")
    with pytest.raises((CheckpointError, InvalidInput), match=said):
        LVViTFamily().load("lvvit:s", tmp_path / "weights.safetensors", **SMALL)


def test_patches_that_have_left_do_not_answer() -> None:
    """The answer is that of the patches that are left, read off their own logits; half of the rest are above it."""
    shape = LVVITS["lvvit"]
    model = own(shape)
    assert isinstance(model, LVViT) and model.patch_classifier is not None
    attach_tokens_(model, family_of(model), TokenPolicy(Random(seed=1), (2,), (0.5,)), by="mask")
    hidden: list[torch.Tensor] = []
    model.norm.register_forward_pre_hook(lambda module, given: hidden.append(given[0]))
    with torch.no_grad(), recording_tokens(model) as runs:
        logits = model(images(shape))
        tokens = model.norm.forward(hidden[0])
        answers = model.patch_classifier(tokens[:, 1:])
        left = runs[0].trail[0]
        kept = answers.gather(1, left[..., None].expand(-1, -1, shape.classes)).amax(1)
        assert left.shape[1] == 2 and (answers.amax(1) > kept).any()
        torch.testing.assert_close(logits, model.classifier(tokens[:, 0]) + 0.5 * kept)


def test_answers_are_those_of_the_class_token_and_of_every_patch() -> None:
    model = own(LVVITS["lvvit"])
    assert isinstance(model, LVViT)
    answer, patches = model.answers(images(LVVITS["lvvit"]))
    assert patches is not None and patches.shape == (5, 4, 3)
    torch.testing.assert_close(model(images(LVVITS["lvvit"])), answer + 0.5 * patches.max(1).values)
    alone = own(LVVITS["lvvit-svda"])
    assert isinstance(alone, LVViT) and alone.answers(images(LVVITS["lvvit"]))[1] is None
    assert family_of(alone).token_layout(alone).pooled == "class"


def test_stopped_and_resumed_is_never_stopped(tmp_path: Path) -> None:
    """The running statistics of the stem are part of what is resumed."""

    class Crash(BaseException):
        pass

    def crash() -> None:
        raise Crash

    def run(folder: str):
        shape = LVViTConfig.uniform("svda", **{**SMALL, "image_size": 8, "patch_size": 4, "channels": 1, "classes": 3})
        model = initialize_(LVViT(shape), seed=0)
        return train(model, splits(), config(), tmp_path / folder)

    whole = run("whole")
    with pytest.raises(Crash), at(3, crash):
        run("stopped")
    assert same(run("stopped"), whole)
    stem = whole.model.stem  # type: ignore[union-attr]
    assert not torch.equal(stem.norms[0].running_mean, torch.zeros(STEM))  # type: ignore[union-attr, arg-type]


def test_published_weights_have_their_preprocessing(tmp_path: Path) -> None:
    """The authors measure on a crop of 0.9 of the bicubic picture, 248 pixels for 224; a model without weights has
    none, because its data decide.
    """
    write_tensors(tmp_path / "weights.safetensors", published())
    family = LVViTFamily()
    geometry = family.geometry(family.load("lvvit:t", tmp_path / "weights.safetensors", **SMALL))
    assert geometry is not None
    assert (geometry.resize, geometry.interpolation, geometry.size) == ("shortest_edge", "bicubic", (32, 32))
    assert published_geometry(224).resize_to == (248, 248)
    assert family.geometry(build_model("lvvit:t", **SMALL)) is None
