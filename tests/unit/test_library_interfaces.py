"""What the libraries, their trainers and their users call on a loaded model, and the folders that they write."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnrx
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.vit.models import answer, family_of, model_fingerprint
from attnrx.vit.models.parts.record import record_of
from support.pretrained import VIT, OwnViT, of_hf, of_timm, of_torchvision

transformers = pytest.importorskip("transformers")
CLASSES = ("ViTForImageClassification", "CLIPVisionModelWithProjection")


def small(model: Any) -> Any:
    """The model with fewer directions."""
    loaded = attnrx.load(model)
    images = torch.zeros(8, *family_of(loaded).input_shape(loaded), dtype=torch.float64)
    images += torch.linspace(-1, 1, 8, dtype=torch.float64)[:, None, None, None]
    return attnrx.realize(loaded, attnrx.prescribe(attnrx.diagnose(loaded, images), "qk=total_rank:0.6"))


@pytest.mark.parametrize("kind", CLASSES)
def test_transformers_reads_no_folder_as_a_random_model(kind: str, tmp_path: Path) -> None:
    model = small(of_hf(kind))
    attnrx.save(model, tmp_path / "saved")
    assert model_fingerprint(attnrx.load(tmp_path / "saved")) == model_fingerprint(model)
    for name in {*CLASSES, "ViTModel", "AutoModel", "AutoModelForImageClassification"}:
        with pytest.raises(ValueError, match=r"attnrx\.load"):
            getattr(transformers, name).from_pretrained(tmp_path / "saved")
    # The library's own method states other attention in config.json than the weights are of.
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(CheckpointError, match="would be random"):
        attnrx.load(tmp_path / "own")


@pytest.mark.parametrize("kind", CLASSES)
def test_a_model_that_was_only_loaded_is_saved_by_its_library(kind: str, tmp_path: Path) -> None:
    model: Any = attnrx.load(of_hf(kind))
    before = model_fingerprint(model)
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "doubled", state_dict=dict(doubled))
    assert model_fingerprint(model) == before
    for folder, tensors in (("own", model.state_dict()), ("doubled", doubled)):
        for loaded in (getattr(transformers, kind).from_pretrained(tmp_path / folder), attnrx.load(tmp_path / folder)):
            assert type(loaded) is type(model)
            found = loaded.state_dict()
            assert found.keys() == tensors.keys()
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.usefixtures("single_precision")
def test_a_folder_of_the_trainer_is_read_with_the_folder_of_its_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = small(of_hf("ViTForImageClassification").float().double()).float()
    attnrx.save(model, tmp_path / "slim")
    settings = transformers.TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model, settings)
    with torch.no_grad():
        model.classifier.weight.mul_(3)
    trainer.save_model(str(tmp_path / "trained"))
    with pytest.raises(CheckpointError, match="would be random"):  # its configuration states other attention
        attnrx.load(tmp_path / "trained")
    (tmp_path / "trained" / "config.json").unlink()  # as trainers of others save a model
    with pytest.raises(CheckpointError, match=r"The Trainer of transformers .* weights="):
        attnrx.load(tmp_path / "trained")
    for weights in (tmp_path / "trained", tmp_path / "trained" / "model.safetensors"):
        assert model_fingerprint(attnrx.load(tmp_path / "slim", weights=weights)) == model_fingerprint(model)
    with pytest.raises(CheckpointError, match="safetensors"):
        attnrx.load(tmp_path / "slim", weights=tmp_path / "nothing")
    attnrx.save(small(of_hf("ViTModel")), tmp_path / "other")
    with pytest.raises(CheckpointError, match="do not fit"):
        attnrx.load(tmp_path / "other", weights=tmp_path / "trained")


@pytest.mark.parametrize("crops", [False, True])
def test_the_image_processor_is_saved_with_the_model(crops: bool, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    settings: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4], "resample": 3}
    settings["size"] = {"shortest_edge": 20} if crops else {"height": 16, "width": 16}
    if crops:
        settings |= {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}}
    processor = transformers.ViTImageProcessor(**settings)
    of_hf("ViTForImageClassification").float().save_pretrained(tmp_path / "original")
    processor.save_pretrained(tmp_path / "original")
    attnrx.save(attnrx.load(f"hf:{tmp_path / 'original'}"), tmp_path / "saved")
    read = transformers.AutoImageProcessor.from_pretrained(tmp_path / "saved")
    pixels = np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    picture = image.fromarray(pixels)
    expected, actual = (each(picture, return_tensors="pt")["pixel_values"] for each in (processor, read))
    torch.testing.assert_close(actual, expected)
    # It belongs to the model: a later one without a processor has none.
    attnrx.save(attnrx.load(of_hf("ViTForImageClassification")), tmp_path / "saved")
    assert not (tmp_path / "saved" / "preprocessor_config.json").exists()


@pytest.mark.usefixtures("single_precision")
def test_pipelines_run_a_saved_folder(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    of_hf("ViTForImageClassification").float().save_pretrained(tmp_path / "original")
    transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "original")
    attnrx.save(attnrx.load(f"hf:{tmp_path / 'original'}"), tmp_path / "saved")
    picture = image.fromarray(np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8))
    answers = [
        transformers.pipeline(
            "image-classification",
            model=model,
            image_processor=transformers.AutoImageProcessor.from_pretrained(tmp_path / folder),
        )(picture)
        for folder, model in (
            ("original", transformers.ViTForImageClassification.from_pretrained(tmp_path / "original")),
            ("saved", attnrx.load(tmp_path / "saved")),
        )
    ]
    assert [each["label"] for each in answers[0]] == [each["label"] for each in answers[1]]
    assert [each["score"] for each in answers[0]] == pytest.approx([each["score"] for each in answers[1]], abs=1e-5)
    # By its path alone the folder is refused, with what opens it.
    with pytest.raises(ValueError, match=r"attnrx\.load\(folder\)"):
        transformers.pipeline("image-classification", model=str(tmp_path / "saved"))


def test_attributes_and_methods_are_those_of_the_library(tmp_path: Path) -> None:
    model: Any = small(of_timm(VIT))
    assert model.get_classifier() is model.head and len(model.blocks) == 2
    assert model.num_classes == 5 and model.embed_dim == model.num_features == 12
    assert model.no_weight_decay() <= {name for name, _ in model.named_parameters()} | {"dist_token", "reg_token"}
    model.set_grad_checkpointing(False)
    images = torch.linspace(-1, 1, 2 * 3 * 16 * 16, dtype=torch.float64).view(2, 3, 16, 16)
    (features,) = model.forward_intermediates(images, indices=1, intermediates_only=True, norm=True)
    assert torch.equal(features.flatten(2).mT, model.forward_features(images)[:, 1:])
    model.reset_classifier(7)
    assert model.head.out_features == 7
    attnrx.save(model, tmp_path / "saved")
    assert torch.equal(attnrx.load(tmp_path / "saved")(images), model(images))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        model.nothing  # noqa: B018
    hugging: Any = small(of_hf("ViTForImageClassification"))
    assert hugging.num_labels == 5 and hugging.main_input_name == "pixel_values"
    output = hugging(pixel_values=images, output_hidden_states=True)
    assert len(output.hidden_states) == 3 and torch.equal(output.logits, answer(hugging, images))
    assert attnrx.load(of_torchvision()).hidden_dim == 12


@pytest.mark.parametrize("kind", ["timm", "hf"])
def test_copies_have_the_same_weights(kind: str) -> None:
    model = attnrx.load(of_timm(VIT) if kind == "timm" else of_hf("ViTForImageClassification"))
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(made) is type(model) and record_of(made) == record_of(model)
        assert model_fingerprint(made) == model_fingerprint(model)


def test_another_network_with_mlps_has_hidden_units() -> None:
    model = attnrx.load("timm:mixer_s32_224", pretrained=False)
    assert len(attnrx.models.family_of(model).mlp(model)) == 16  # two in each of 8 layers


NAMES = {
    "vit_tiny_patch16_224": "'timm:vit_tiny_patch16_224'",
    "vit_small_patch14_dinov2.lvd142m": "'timm:vit_small_patch14_dinov2.lvd142m'",
    "vit_b_16": "'torchvision:vit_b_16'",
    "google/vit-base-patch16-224": "'hf:google/vit-base-patch16-224' or 'hub:google/vit-base-patch16-224'",
    "nothing_like_it": "is not a folder, and it names no model",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_without_a_prefix_get_the_one_that_was_meant(name: str) -> None:
    with pytest.raises(CheckpointError, match=NAMES[name]):
        attnrx.load(name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (of_timm(VIT).state_dict(), "A state dict has weights, but no architecture"),
        ({"model": of_timm(VIT).state_dict()}, "A state dict has weights, but no architecture"),
        (OwnViT, "This is a class: give an instance"),
        (None, "give a folder, a name such as"),
        (3, "give a folder, a name such as"),
        ([0] * 10_000, "give a folder, a name such as"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_what_is_no_model_is_refused_in_few_words(given: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as refusal:
        attnrx.load(given)
    assert len(str(refusal.value)) < 500
