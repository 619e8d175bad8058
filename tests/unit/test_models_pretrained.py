"""Models of timm and transformers with our attention: the same logits, the same costs, and refusals by name."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from attnrx.data.model_data import preprocessing_of
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.modules import fixed_weights
from attnrx.vit.attention import Attention
from attnrx.vit.models import working_copy
from attnrx.vit.models.boundary.adoption import adopt
from attnrx.vit.models.boundary.loading import load_model
from attnrx.vit.models.checkpoint import save_weights
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.huggingface_family import READERS, reader_of
from attnrx.vit.models.parts.mlp import LowRankLinear
from attnrx.vit.models.users.reader import ModuleFamily
from attnrx.vit.models.working.token_hooks import attach_tokens_
from attnrx.vit.tokens import parse_policy
from attnrx.workflows.load import load
from attnrx.workflows.save import push_to_hub
from attnrx_lab.costs import layer_norm_features, outer_norm_features
from support.command_line import record
from support.pretrained import CASES, HF, SMALL, TIMM, VIT, adopted_once, of_hf, of_timm

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[AdoptedFamily, Any, Any]:
    """A family, a foreign model, and a copy of it that was adopted."""
    family, model, adopted = adopted_once(request.param)
    return family, model, copy.deepcopy(adopted)


def images(family: AdoptedFamily, model: nn.Module, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, *family.input_shape(model), generator=generator, dtype=torch.float64)


def of_library(model: Any, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments with which a model of transformers takes a batch."""
    reader = reader_of(model)
    return reader.inputs(model).arguments(batch)[1]


def logits(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        given = model(**of_library(model, batch)) if type(model).__name__ in READERS else model(batch)
    return given if isinstance(given, torch.Tensor) else reader_of(model).answer_of(given)


def test_logits_stay(case: tuple[AdoptedFamily, Any, Any]) -> None:
    family, model, adopted = case
    batch = images(family, adopted)
    torch.testing.assert_close(logits(adopted, batch), logits(model, batch), rtol=0, atol=1e-12)
    assert family.matches(adopted) and not family.matches(model)
    assert family.adopts(model) != isinstance(family, ModuleFamily) and not family.adopts(adopted)
    assert len(family.attention(adopted)) == 2
    assert not any(module.training for module in adopted.modules())
    for parameter in adopted.parameters():  # the parts of a fused projection no longer share a storage
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    assert not any(isinstance(module, Attention) for module in model.modules())  # the model itself was left alone


def test_a_description_rebuilds_the_model(case: tuple[AdoptedFamily, Any, Any]) -> None:
    family, _, adopted = case
    channels = family.input_shape(adopted)[0]
    mean, std = (0.1, 0.2, 0.3, 0.4) * channels, (0.4, 0.5, 0.6, 0.7) * channels
    mean, std = mean[:channels], std[:channels]
    adopted.origin = replace(adopted.origin, mean=mean, std=std)
    description = json.loads(json.dumps(family.describe(adopted)))
    with torch.device("meta"):
        twin = family.build(description)
    assert all(tensor.is_meta for tensor in twin.state_dict().values())
    twin.load_state_dict(adopted.state_dict(), strict=True, assign=True)
    batch = images(family, adopted)
    assert torch.equal(logits(twin.eval(), batch), logits(adopted, batch))
    assert family.normalization(twin) == (mean, std)
    assert family.describe(twin) == description


def test_costs_are_the_parameters_and_products_of_the_model(case: tuple[AdoptedFamily, Any, Any]) -> None:
    family, model, adopted = case
    costs = family.costs(adopted)
    assert costs.params == sum(parameter.numel() for parameter in adopted.parameters())
    if "num_kv_heads" not in adopted.origin.arguments:  # keys and values of grouped heads are repeated
        assert costs.params == sum(parameter.numel() for parameter in model.parameters())
    divided: list[int] = []
    handles = [
        module.register_forward_hook(lambda _, given, output: divided.append(output.numel()))
        for module in adopted.modules()
        if hasattr(module, "normalized_shape")
    ]
    adopted.requires_grad_(False)  # the counter cannot follow a parameter that is expanded without gradients
    with torch.no_grad(), fixed_weights():
        logits(adopted, images(family, adopted, 1))  # computes biases of pairs, which are of weights alone
        divided.clear()
        with FlopCounterMode(display=False) as counter:
            logits(adopted, images(family, adopted, 1))
    for handle in handles:
        handle.remove()
    biases = costs.embeddings.macs  # which are computed once, and kept
    assert 2 * (costs.product_macs - biases) == counter.get_total_flops()
    assert sum(divided) == (outer_norm_features(adopted, costs) or 0) + sum(map(layer_norm_features, costs.layers))


def test_low_rank_mlps_are_described_rebuilt_and_priced(case: tuple[AdoptedFamily, Any, Any]) -> None:
    family, _, adopted = case
    planned = family.costs(adopted, mlp_ranks=((None, 3), (2, None)))
    for layer, which, rank in ((0, 1, 3), (1, 0, 2)):
        linear: Any = family.mlp(adopted)[layer][which]
        factors = LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None).double()
        family.set_mlp_(adopted, layer, which, factors)
    with torch.device("meta"):
        twin = family.build(family.describe(adopted))
    twin.load_state_dict(adopted.state_dict(), strict=True, assign=True)
    batch = images(family, adopted)
    assert torch.equal(logits(twin.eval(), batch), logits(adopted, batch))
    assert family.costs(twin) == planned
    assert planned.params == sum(parameter.numel() for parameter in adopted.parameters())


def test_an_attention_can_be_replaced_and_is_described(case: tuple[AdoptedFamily, Any, Any]) -> None:
    family, _, adopted = case
    own = family.attention(adopted)[1].spec
    if own.fixes_scores or own.fixes_values:
        with pytest.raises(InvalidInput, match=r"need all|Give the heads of a layer one rank"):
            own.with_ranks((1, 2), (2, 0), "none")
        return
    spec = own.with_ranks((1, 2), (2, 0), "none")
    planned = family.costs(adopted, (family.attention(adopted)[0].spec, spec))
    family.set_attention_(adopted, 1, Attention(spec).double())
    rebuilt = family.build(family.describe(adopted))
    assert family.attention(rebuilt)[1].spec == spec
    assert planned == family.costs(rebuilt)
    assert planned.params == sum(parameter.numel() for parameter in rebuilt.parameters())


def test_softmax_in_single_precision_is_no_reason_to_refuse() -> None:
    """The eager attention of transformers computes its softmax in float32, whatever the type of the model."""
    model = of_hf("ViTForImageClassification", attn_implementation="eager")
    adopted = adopt(HF, model)
    batch = images(HF, adopted)
    torch.testing.assert_close(logits(adopted, batch), logits(model, batch), rtol=0, atol=1e-6)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(adopted, batch), logits(model, batch), rtol=0, atol=1e-12)


def test_training_modes_and_frozen_weights_are_kept() -> None:
    model = of_timm(VIT).float().train()
    model.blocks[0].attn.qkv.requires_grad_(False)
    adopted = adopt(TIMM, model)
    first, second = TIMM.attention(adopted)
    assert adopted.training and first.training and model.training
    assert not first.value.weight.requires_grad and first.output.weight.requires_grad
    assert second.value.weight.requires_grad
    assert first.value.weight.dtype == torch.float32


REFUSED: dict[str, tuple[AdoptedFamily, Callable[[], nn.Module], str]] = {
    "differential": (TIMM, partial(of_timm, VIT, attn_layer="diff", num_heads=2), r"parts that are not read \(lambda_"),
    "parallel": (TIMM, partial(of_timm, "vit_base_patch16_xp_224"), "block ParallelScalingBlock has no"),
    "side by side": (TIMM, partial(of_timm, "vit_small_patch16_18x2_224"), "block ParallelThingsBlock has no"),
    "hf masked patches": (HF, partial(of_hf, "ViTMAEModel", mask_ratio=0.5), "load it with mask_ratio=0.0"),
    "hf backbone": (HF, partial(of_hf, "DPTForDepthEstimation", backbone_config={"model_type": "dinov2"}), "DPT whose"),
}
# On the meta device: these architectures are large, and refusing looks at no weights.
OTHERS = {
    "vit_tiny_r_s16_p8_224": "the patch embedding HybridEmbed",
    "swin_tiny_patch4_window7_224": "the class SwinTransformer has no reader",
    "cait_xxs24_224": r"parts that are not read \(proj_l, proj_w\)|the class Cait",
    "test_resnet": "the class ResNet",
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_attention_is_refused_by_name(name: str) -> None:
    family, make, message = REFUSED[name]
    with pytest.raises(NotSupported, match=message):
        adopt(family, make())


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_are_refused_by_name(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(NotSupported, match=OTHERS[name]):
        adopt(TIMM, model)


@pytest.mark.parametrize("classes", [0, 5])
def test_a_model_without_pooling_is_refused(classes: int) -> None:
    with pytest.raises(
        NotSupported, match=r"returns the shape \(2, 5, \d+\) for 2 images, not one row.*global_pool='avg'"
    ):
        adopt(TIMM, of_timm(VIT, global_pool="", num_classes=classes))


IN_IT = r"but the {name} in it is: .*\('{path}'\)"
# By wrapper its error around a model of a library, and around a model of attnrx.
WRAPPERS: dict[str, tuple[Callable[[nn.Module], Any], str, str, str]] = {
    "data parallel": (nn.DataParallel, IN_IT, IN_IT, "module"),
    "compiled": (lambda model: torch.compile(model), "was compiled by torch.compile", IN_IT, "_orig_mod"),
    "sequence": (lambda model: nn.Sequential(nn.Identity(), model), "", IN_IT, "1"),
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("case", ["vit", "hf vit"])
def test_a_wrapper_is_refused_with_the_path_of_its_model(name: str, case: str) -> None:
    wrap, of_library, of_attnrx, path = WRAPPERS[name]
    for inside, text in ((CASES[case][1](), of_library), (adopted_once(case)[2], of_attnrx)):
        if text:  # nn.Sequential is a module like those of users
            with pytest.raises(NotSupported, match=text.format(name=type(inside).__name__, path=path)):
                load(wrap(inside))


def test_features_of_intermediate_layers_stay_those_of_timm() -> None:
    features = of_timm(VIT, features_only=True, out_indices=(0, 1)).eval()
    batch = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for actual, expected in zip(load(features)(batch), features(batch), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "norm": (lambda model: setattr(model.blocks[1], "norm1", nn.LayerNorm(12, eps=0.1).double()), "changed after"),
    "epsilon": (lambda model: setattr(model.blocks[1].norm1, "eps", 2e-6), "changed after"),  # too little for logits
    "layers": (lambda model: setattr(model, "blocks", model.blocks[:1]), "has 2 layers, .* 1: blocks cannot"),
    "head": (
        lambda model: setattr(model, "head", nn.Sequential(nn.Linear(12, 7), nn.Softmax(-1)).double()),
        r"num_classes=N.*Its head is Sequential.* rebuilt one Linear\(.*out_features=5",
    ),
    "parameter": (
        lambda model: setattr(model, "pos_embed", nn.Parameter(model.pos_embed[0])),
        r"Its pos_embed is of shape \(5, 12\), and that of the rebuilt one of shape \(1, 5, 12\)",
    ),
    "shared block": (
        lambda model: model.blocks.__setitem__(1, model.blocks[0]),
        "shares one tensor between .*blocks.0",
    ),
    "shared weight": (
        lambda model: setattr(model.blocks[1].norm1, "weight", model.blocks[0].norm1.weight),
        "shares one tensor between .*blocks.0.norm1.weight and .*blocks.1.norm1.weight",
    ),
    "types": (lambda model: model.head.float(), "mixes floating-point types"),
    "hook": (
        lambda model: model.blocks[0].attn.register_forward_hook(lambda *given: 2 * given[-1]),
        r"a hook or a replaced forward of blocks\.0\.attn changes the outputs",
    ),
    "origin": (lambda model: delattr(model, "pretrained_cfg"), "has no pretrained_cfg with an architecture"),
    "finite": (lambda model: model.head.weight.data.fill_(float("nan")), "holds NaN or infinity in 'head.weight'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_was_changed_is_not_adopted_silently(name: str) -> None:
    change, message = CHANGES[name]
    model = of_timm(VIT)
    change(model)
    with pytest.raises((NotSupported, InvalidInput), match=message):
        adopt(TIMM, model)


def test_arguments_that_cannot_be_saved_are_refused() -> None:
    class Activation(nn.GELU):
        """A class of no library."""

    for layer in (Activation, partial(Activation), lambda: nn.GELU()):
        with pytest.raises(NotSupported, match="act_layer='gelu'"):
            adopt(TIMM, of_timm(VIT, act_layer=layer))


LAYERS: dict[str, dict[str, Any]] = {
    "activation": {"act_layer": nn.ReLU},
    "norm": {"norm_layer": nn.LayerNorm},
    "norm with keywords": {"norm_layer": partial(nn.LayerNorm, eps=1e-3)},
    "norm of timm": {"norm_layer": timm.layers.RmsNorm},
    "gated MLP": {"mlp_layer": timm.layers.SwiGLU},
    "gated MLP with keywords": {"mlp_layer": partial(timm.layers.GluMlp, gate_last=False)},
    "names": {"act_layer": "relu", "norm_layer": "layernorm"},
}


@pytest.mark.parametrize("name", LAYERS)
def test_models_with_classes_of_layers_are_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = of_timm(VIT, **LAYERS[name])
    adopted = adopt(TIMM, model)
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(adopted(images), model(images))
    save_weights(tmp_path / "saved", adopted, TIMM)
    torch.testing.assert_close(load(tmp_path / "saved")(images), adopted(images))


def test_saved_layers_are_classes_of_the_libraries_only() -> None:
    origin = adopt(TIMM, of_timm(VIT, act_layer=nn.ReLU)).origin
    for text in ("os:system", "torch.nn:functional", "torch.nn:Parameter", "timm.layers:nothing", "sys:exit"):
        changed = {**origin.arguments, "act_layer": {"layer class": text, "keywords": {}}}
        with pytest.raises(InvalidInput, match="no class of layers"):
            TIMM.create(origin.architecture, changed)
    assert adopt(TIMM, of_timm(VIT, act_layer="relu"))


def test_masks_and_attention_weights_are_refused() -> None:
    adopted: Any = adopt(TIMM, of_timm(VIT))
    with pytest.raises(NotSupported, match="masks"):
        adopted.source(images(TIMM, adopted), is_causal=True)
    adopted = adopt(HF, of_hf("ViTForImageClassification"))
    with pytest.raises(NotSupported, match="output_attentions=True"):
        adopted.source(images(HF, adopted), output_attentions=True)
    with pytest.raises(NotSupported, match="attention_mask"):
        adopted.source(images(HF, adopted), attention_mask=torch.tensor([[1, 1, 0, 1, 1]] * 3))
    adopted.source.set_attn_implementation("eager")
    adopted.source.config.output_attentions = True
    with pytest.raises(NotSupported, match="output_attentions=True"):
        adopted.source(images(HF, adopted))


@pytest.mark.parametrize("name", ["hf yolos", "hf dpt", "hf videomae"])
def test_tokens_are_not_pruned_where_the_answer_needs_all_of_them(name: str) -> None:
    family, _, adopted = adopted_once(name)
    with pytest.raises(NotSupported, match=f"{adopted.origin.architecture} pools its tokens by"):
        attach_tokens_(copy.deepcopy(adopted), family, parse_policy("tome:1@every"))


@pytest.mark.parametrize("name", ["timm", "transformers"])
def test_models_that_fit_their_positions_take_other_sizes(name: str) -> None:
    family, model = {
        "timm": (TIMM, partial(of_timm, VIT, dynamic_img_size=True)),
        "transformers": (HF, partial(of_hf, "Dinov2ForImageClassification")),
    }[name]
    foreign = model()
    adopted: Any = working_copy(load(foreign))
    family.resize_(adopted, 24, 32)
    batch = images(family, adopted)
    torch.testing.assert_close(logits(adopted, batch), logits(foreign, batch), rtol=0, atol=1e-12)
    assert family.build(family.describe(adopted)).origin.input_shape == (3, 24, 32)
    assert family.costs(adopted).patches.macs == 12 * (3 * 8 * 8) * 12
    with pytest.raises(InvalidInput, match="do not tile"):
        family.resize_(adopted, 20, 32)


def test_timm_weights_are_read_strictly(tmp_path: Path) -> None:
    model = of_timm(VIT)
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    adopted = adopt(TIMM, TIMM.instance(VIT, weights=path, **SMALL)).eval()
    batch = images(TIMM, adopted)
    torch.testing.assert_close(logits(adopted, batch), logits(model, batch), rtol=0, atol=1e-12)
    assert not adopted.training
    with pytest.raises(CheckpointError, match="do not fit"):
        TIMM.instance(VIT, weights=path, **{**SMALL, "num_classes": 7})
    with pytest.raises(CheckpointError, match="not a file"):
        TIMM.instance(VIT, weights=tmp_path / "nothing.safetensors", **SMALL)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        TIMM.instance(VIT, weights=path, **SMALL)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_tiny_patch16_224", {"img_size": 96}),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 98}),
    ],
    ids=["one classifier", "two classifiers", "other images", "other images, and a classifier that is not published"],
)
def test_weights_of_a_model_fine_tuned_to_other_classes_or_images_are_read(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    fine_tuned = timm.create_model(name, num_classes=7, **arguments)
    torch.save(fine_tuned.state_dict(), tmp_path / "fine_tuned.pt")
    adopted = adopt(TIMM, TIMM.instance(name, weights=tmp_path / "fine_tuned.pt")).eval()
    assert [head.out_features for head in TIMM.heads(adopted)] == [7] * len(TIMM.heads(adopted))
    side = arguments.get("img_size", 224)
    assert adopted.origin.input_shape == (3, side, side)
    batch = torch.randn(2, 3, side, side)
    with torch.no_grad():
        torch.testing.assert_close(adopted(batch), fine_tuned.eval()(batch), rtol=1e-4, atol=1e-5)


def test_weights_for_images_that_are_no_square_are_refused(tmp_path: Path) -> None:
    torch.save(timm.create_model(VIT, img_size=(96, 128)).state_dict(), tmp_path / "wide.pt")
    with pytest.raises(CheckpointError, match="49 tokens, of which no square grid is left"):
        TIMM.instance(VIT, weights=tmp_path / "wide.pt")


def test_folders_of_transformers_are_read(tmp_path: Path) -> None:
    model = of_hf("ViTForImageClassification")
    model.save_pretrained(tmp_path / "plain")
    adopted = load_model(f"hf:{tmp_path / 'plain'}")
    batch = images(HF, adopted)
    torch.testing.assert_close(logits(adopted, batch), logits(model, batch), rtol=0, atol=1e-12)
    assert not adopted.training and HF.normalization(adopted) == ((0.5,) * 3, (0.5,) * 3)


def test_pictures_go_through_the_image_processor_of_transformers(tmp_path: Path) -> None:
    Image = pytest.importorskip("PIL.Image")
    of_hf("Dinov2ForImageClassification").float().save_pretrained(tmp_path)
    # With Pillow: that with torchvision, which rounds differently, returns a few pixels that are one level off.
    processor = transformers.BitImageProcessorPil(
        size={"shortest_edge": 30}, crop_size={"height": 24, "width": 24}, image_mean=[0.1, 0.2, 0.3]
    )
    processor.save_pretrained(tmp_path)
    picture = Image.effect_noise((50, 40), 60)
    preprocess = preprocessing_of(load_model(f"hf:{tmp_path}"))
    expected = processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(preprocess(picture), expected.double(), rtol=0, atol=1e-6)
    assert expected.shape == (3, 24, 24)
    assert HF.geometry(adopt(HF, of_hf("ViTForImageClassification"))) is None


def test_folders_without_a_trained_classifier_are_refused(tmp_path: Path) -> None:
    of_hf("ViTModel").float().save_pretrained(tmp_path / "body")
    path = tmp_path / "body" / "config.json"
    path.write_text(path.read_text().replace("ViTModel", "ViTForMaskedImageModeling"))
    with pytest.raises(CheckpointError, match=r"classifier\.\w+.* would be random"):
        load_model(f"hf:{tmp_path / 'body'}")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load_model(f"hf:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("kind", ["ViTModel", "Dinov2Model", "CLIPVisionModelWithProjection", "SiglipVisionModel"])
def test_a_folder_is_read_as_the_class_that_it_was_saved_as(kind: str, tmp_path: Path) -> None:
    model = of_hf(kind).float()
    model.save_pretrained(tmp_path)
    found, images = load_model(f"hf:{tmp_path}"), torch.randn(2, 3, 16, 16, dtype=torch.float32)
    assert HF.output_kind(found) == "embedding" and not HF.heads(found) and not HF.class_names(found)
    with torch.no_grad():
        torch.testing.assert_close(found(images), reader_of(model).answer_of(model(pixel_values=images)))


def test_the_image_tower_of_a_clip_model_is_read(tmp_path: Path) -> None:
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 24}
    vision = {**small, "image_size": 16, "patch_size": 8, "projection_dim": 7}
    text = {**small, "vocab_size": 20, "bos_token_id": 0, "eos_token_id": 1}
    model = transformers.CLIPModel(transformers.CLIPConfig(vision_config=vision, text_config=text, projection_dim=7))
    model.float().eval().save_pretrained(tmp_path)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float32)
    with torch.no_grad():
        found = load_model(f"hf:{tmp_path}")(images)
        expected = model.get_image_features(pixel_values=images)
    expected = getattr(expected, "pooler_output", expected)
    torch.testing.assert_close(torch.nn.functional.normalize(found), torch.nn.functional.normalize(expected))


def test_a_timm_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    vit = of_timm(VIT, depth=1)
    monkeypatch.delattr("timm.models.get_model_args")
    with pytest.raises(NotSupported, match=r"need timm 1\.0\.31 or newer, and \S+ is installed: pip install -U"):
        load(vit)


def test_a_folder_saved_by_transformers_needs_no_prefix(tmp_path: Path) -> None:
    model = of_hf("ViTForImageClassification").float()
    model.save_pretrained(tmp_path)
    batch = images(HF, adopt(HF, model)).float()
    assert torch.equal(logits(load(tmp_path), batch), logits(load(f"hf:{tmp_path}"), batch))
    assert record("costs", tmp_path)["params"] == HF.costs(adopt(HF, model)).params
    with pytest.raises(CheckpointError, match="not an attnrx model"):  # it lacks the weights' names of a saved model
        push_to_hub(tmp_path, "me/slim")
