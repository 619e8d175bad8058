"""A smaller model takes the place of the original: its class, attributes, copies and code that was written for it."""

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.support.modules import tensors_of
from attnrx.vit.models import family_of
from support.comparisons import assert_same_tensors
from support.pretrained import of_hf, of_timm, of_torchvision, shaken

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::attnrx.support.errors.FactoryWarning")
VIT = "vit_tiny_patch16_224"
IMAGES = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
SIZES: dict[str, Any] = {"image_size": 32, "num_hidden_layers": 3}


class Saliency(nn.Module):
    """A user's own: a decoder on the patches of a backbone."""

    def __init__(self):
        super().__init__()
        self.backbone = of_hf("Dinov2Model", **SIZES)
        self.decoder = nn.ConvTranspose2d(12, 1, 8, 8)

    def forward(self, pixels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        tokens = self.backbone(pixels).last_hidden_state[:, 1:]
        return scale * self.decoder(tokens.transpose(1, 2).unflatten(2, (4, 4)))


def swin() -> Any:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=12, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=5
    )
    return shaken(transformers.SwinForImageClassification(config))


def segmenter() -> Any:
    """A segmentation model of transformers around a backbone of its own library."""
    backbone = of_hf("Dinov2Backbone", **SIZES, out_features=["stage2", "stage3"]).config
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, pool_scales=[1, 2], num_labels=4, use_auxiliary_head=False
    )
    return shaken(transformers.UperNetForSemanticSegmentation(config))


EVERY = "qk=total_rank:0.5 vo=total_rank:0.5 hidden=total_rank:0.5"
TOKENS = f"{EVERY} tokens=ward:0.75@2"
# What makes a model, and what is prescribed.
MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "timm": (lambda: of_timm(VIT, depth=3, img_size=32), TOKENS),
    "features": (lambda: shaken(timm.create_model(
        VIT, features_only=True, out_indices=(0, 2), img_size=32, patch_size=8, embed_dim=12, num_heads=3, depth=3
    )), TOKENS),
    "classifier": (lambda: of_hf("ViTForImageClassification", **SIZES), TOKENS),
    "backbone": (lambda: of_hf("Dinov2Backbone", **SIZES, out_features=["stage1", "stage3"]), TOKENS),
    "rotary": (lambda: of_hf("DINOv3ViTBackbone", **SIZES, out_features=["stage3"]), EVERY),
    "segmenter": (segmenter, TOKENS),
    "torchvision": (lambda: of_torchvision(image_size=32, num_layers=3), TOKENS),
    "own": (lambda: shaken(Saliency()), TOKENS),
    "units": (swin, "hidden=total_rank:0.5"),
}  # fmt: skip


def pair(name: str, text: str | None = None) -> tuple[Any, Any]:
    """The original and a smaller model, in evaluation mode."""
    make, rules = MODELS[name]
    rules = text or rules
    original = make().double().eval()
    model = rx.load(original)
    return original, rx.realize(model, rx.prescribe(rx.diagnose(model, IMAGES), rules)).eval()


@torch.no_grad()
def outputs(model: Any, images: torch.Tensor = IMAGES) -> dict[str, torch.Tensor]:
    return tensors_of(model(images))


@pytest.mark.parametrize("name", MODELS)
def test_the_class_is_that_of_the_original(name: str) -> None:
    original, small = pair(name)
    assert type(small) is type(original) and small.__class__ is type(original)
    assert family_of(small) is family_of(rx.load(original))
    expected = {key: tensor.shape for key, tensor in outputs(original).items()}
    assert {key: tensor.shape for key, tensor in outputs(small).items()} == expected
    assert type(small(IMAGES)) is type(original(IMAGES))


def torch_copy(model: Any) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("name", MODELS)
def test_copies_have_the_same_outputs_before_and_after_a_pass(name: str) -> None:
    original, small = pair(name)
    fresh = copy.deepcopy(small), pickle.loads(pickle.dumps(small)), torch_copy(small)
    expected, _ = outputs(small), outputs(original)
    copies = [*fresh, copy.deepcopy(small), copy.copy(small)]
    try:
        torch_copy(original)
    except AttributeError as error:  # transformers installs hooks in a pass that cannot be pickled
        assert "output_capturing_hook" in str(error)
    else:
        copies += [torch_copy(small), pickle.loads(pickle.dumps(small))]
    for each in copies:
        assert type(each) is type(small)
        assert_same_tensors(outputs(each), expected)
    averaged = torch.optim.swa_utils.AveragedModel(small)
    averaged.update_parameters(small)
    assert_same_tensors(outputs(averaged), expected, 1e-12)
    other = copy.deepcopy(small)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(small.state_dict())
    assert_same_tensors(outputs(other), expected)
    half = copy.deepcopy(small).half()
    assert all(tensor.dtype == torch.float16 for tensor in outputs(half, IMAGES.half()).values())


@pytest.mark.parametrize("name", MODELS)
def test_hooks_are_called_with_gradients_and_without(name: str) -> None:
    _, small = pair(name)
    ends = ("blocks.1", "layer.1", "layer_1", "layers.1.blocks.0", "layers.1")
    layer = next(part for path, part in small.named_modules() if path.endswith(ends))
    for is_recorded in (False, True, False):
        calls: list[str] = []
        handles = [
            layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append("before")),
            layer.register_forward_hook(lambda *_, calls=calls: calls.append("after")),
        ]
        with torch.set_grad_enabled(is_recorded):
            tensor = next(iter(tensors_of(small(IMAGES)).values()))
        assert calls == ["before", "after"] and tensor.requires_grad == is_recorded
        for handle in handles:
            handle.remove()
        small(IMAGES)
        assert len(calls) == 2
    torch.stack([tensor.square().sum() for tensor in tensors_of(small.train()(IMAGES)).values()]).sum().backward()
    assert all(parameter.grad is not None for path, parameter in small.named_parameters() if "mlp" in path)


@pytest.mark.parametrize("name", ["backbone", "segmenter", "units"])
def test_a_module_that_its_library_creates_is_loaded_without_a_factory(name: str, tmp_path: Path) -> None:
    _, small = pair(name)
    rx.save(small, tmp_path / "saved")
    assert_same_tensors(outputs(rx.load(tmp_path / "saved")), outputs(small))


@pytest.mark.parametrize("name", ["classifier", "backbone", "segmenter", "units"])
def test_save_pretrained_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """It writes the weights, and the configuration of the original: a model of other shapes is not made from it."""
    original, small = pair(name)
    loaded: Any = rx.load(original)
    loaded.save_pretrained(tmp_path / "original")
    assert_same_tensors(outputs(type(small).from_pretrained(tmp_path / "original").eval()), outputs(original))
    rx.save(small, tmp_path / "saved")
    for parameter in small.parameters():  # as training does
        parameter.data.mul_(1.01)
    small.save_pretrained(tmp_path / "weights", save_original_format=False)  # with the names of the model's parts
    written = rx.serialization.read_tensors(tmp_path / "weights" / "model.safetensors")
    assert_same_tensors(written, small.state_dict())
    for weights in (tmp_path / "weights", tmp_path / "weights" / "model.safetensors"):
        assert_same_tensors(outputs(rx.load(tmp_path / "saved", weights=weights)), outputs(small))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(small).from_pretrained(tmp_path / "weights")


def test_a_backbone_gives_its_maps_by_every_call_of_transformers() -> None:
    original, small = pair("backbone")
    maps = small(IMAGES).feature_maps
    assert small.channels == original.channels and small.out_features == ["stage1", "stage3"]
    for output in (small(pixel_values=IMAGES), small.forward_with_filtered_kwargs(IMAGES)):
        for found, expected in zip(output.feature_maps, maps, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(small(IMAGES, output_hidden_states=True).hidden_states) == 4
    # In the place of the backbone of another model.
    whole, _ = pair("segmenter")
    whole.backbone = small
    assert whole(IMAGES).logits.shape == (4, 4, 32, 32)


def test_optimizers_of_timm_decay_the_same_parameters() -> None:
    original, small = pair("timm")
    decayed = importlib.import_module("timm.optim").param_groups_layer_decay

    def groups(model: Any) -> list[tuple[float, float]]:
        found = decayed(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.7)
        return sorted((group["weight_decay"], round(group["lr_scale"], 6)) for group in found)

    assert groups(small) == groups(original)
    (embedding,) = [path for path, _ in small.named_parameters() if path.endswith("pos_embed")]
    assert embedding in small.no_weight_decay()


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("name", ["classifier", "units", "own head"])
def test_a_pipeline_and_a_trainer_run_it_unchanged(name: str, tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("accelerate")
    image = pytest.importorskip("PIL.Image")
    model = (swin() if name == "units" else of_hf("ViTForImageClassification", **SIZES)).float()
    if name == "own head":
        model.classifier = nn.Sequential(nn.Linear(12, 8), nn.Softsign(), nn.Linear(8, 5))
    loaded, images = rx.load(model.eval()), IMAGES.float()
    small: Any = rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images), "hidden=total_rank:0.5"))
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    picture = image.new("RGB", (40, 30), (200, 30, 90))
    with caplog.at_level("ERROR", "transformers"):
        classify = transformers.pipeline("image-classification", model=small, image_processor=processor)
    assert not caplog.records  # of a class that is not one of the pipeline
    scores = {each["label"]: each["score"] for each in classify(picture)}
    with torch.no_grad():
        logits = small(pixel_values=processor(picture, return_tensors="pt")["pixel_values"]).logits[0]
    assert scores == pytest.approx({f"LABEL_{k}": float(each) for k, each in enumerate(logits.softmax(0))}, abs=1e-5)
    rows = [{"pixel_values": each, "labels": k % 5, "name": f"{k}"} for k, each in enumerate(images)]  # an extra column
    settings = transformers.TrainingArguments(
        str(tmp_path / "run"), num_train_epochs=2, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        use_cpu=True, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="eval_loss", disable_tqdm=True,
    )  # fmt: skip
    before = copy.deepcopy(small.state_dict())
    trainer = transformers.Trainer(small, settings, train_dataset=rows, eval_dataset=rows)
    loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < loss
    assert not any(torch.equal(tensor, before[key]) for key, tensor in small.state_dict().items())
    folders = sorted((tmp_path / "run").iterdir())
    settings.num_train_epochs = 3
    again = transformers.Trainer(copy.deepcopy(small), settings, train_dataset=rows, eval_dataset=rows)
    again.train(resume_from_checkpoint=str(folders[-1]))
    assert again.state.global_step == 6
    assert trainer.model is small
    rx.save(small, tmp_path / "trained")
    made = None if name != "own head" else lambda: model
    loaded = rx.load(tmp_path / "trained", factory=made)
    assert_same_tensors(outputs(loaded, images), outputs(small.eval(), images), 1e-6)
