"""Loaders yield what a model's own library takes: videos, spectrograms, and padded patches with their mask."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.data.model_data import images_for
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit.models import accepting, family_of
from support.pretrained import of_hf

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning"),
    pytest.mark.usefixtures("single_precision"),
]
GRIDS = (4, 4), (2, 6), (3, 4), (1, 5)  # height and width in patches, of up to 16


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def padded(index: int) -> dict[str, Any]:
    """An item of SigLIP 2, as its image processor makes it."""
    height, width = GRIDS[index % 4]
    patches, mask = torch.zeros(16, 192), torch.zeros(16, dtype=torch.long)
    patches[: height * width], mask[: height * width] = numbers(height * width, 192, seed=index), 1
    return {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([height, width])}


# The function that makes the model, the items of its loader, and the shape of one in attnrx.
CASES: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]], tuple[int, int, int]]] = {
    "spectrogram": (
        lambda: of_hf("ASTForAudioClassification"),
        lambda index: {"input_values": numbers(20, 12, seed=index), "labels": index % 5},
        (1, 20, 12),
    ),
    "tubelets": (
        lambda: of_hf("VideoMAEForVideoClassification"),
        lambda index: {"pixel_values": numbers(4, 3, 16, 16, seed=index), "labels": index % 5},
        (12, 16, 16),
    ),
    "video": (
        lambda: of_hf("VivitForVideoClassification"),
        lambda index: {"pixel_values": numbers(4, 3, 16, 16, seed=index), "labels": index % 5},
        (12, 16, 16),
    ),
    "padded patches": (lambda: of_hf("Siglip2VisionModel", num_patches=16), padded, (1, 16, 195)),
}


def made(name: str, count: int = 8) -> tuple[Any, list[dict[str, Any]]]:
    make, item, _ = CASES[name]
    return make().float(), [item(index) for index in range(count)]


def batched(items: list[dict[str, Any]], size: int) -> list[dict[str, torch.Tensor]]:
    return list(torch.utils.data.DataLoader(items, batch_size=size))  # type: ignore[arg-type]


def answer(output: Any) -> torch.Tensor:
    return output["logits"] if "logits" in output else output["pooler_output"]


def without_labels(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_the_outputs_are_those_of_the_library(name: str) -> None:
    model, items = made(name)
    adopted = rx.load(model)
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        adopted, model = adopted.to(dtype), model.to(dtype)
        (batch,) = batched(items, len(items))
        batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        expected = answer(model(**without_labels(batch)))
        torch.testing.assert_close(answer(adopted(**without_labels(batch))), expected, rtol=0, atol=limit)
        images = torch.cat([each.images for each in images_for(adopted, batched(items, 3)).batches(3)]).to(dtype)
        assert images.shape[1:] == CASES[name][2]
        fitting: Any = accepting(adopted, CASES[name][2])
        torch.testing.assert_close(fitting(images), expected, rtol=0, atol=limit)
        if name != "padded patches":
            torch.testing.assert_close(fitting(next(iter(batch.values()))), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("name", CASES)
def test_every_form_of_data_has_the_same_images(name: str) -> None:
    model, items = made(name)
    adopted = rx.load(model)
    key = next(iter(items[0]))
    forms: list[Any] = [
        torch.utils.data.DataLoader(items, batch_size=3),  # type: ignore[arg-type]
        batched(items, 3),
        items,
    ]
    if name != "padded patches":
        stacked = torch.stack([item[key] for item in items])
        labels = torch.tensor([item["labels"] for item in items])
        forms += [stacked, (stacked, labels), torch.utils.data.TensorDataset(stacked, labels), list(stacked.split(3))]
    found = [torch.cat([batch.images for batch in images_for(adopted, form).batches(3)]) for form in forms]
    for images in found:
        assert torch.equal(images, found[0])
    labels = [torch.cat([batch.labels for batch in images_for(adopted, form).batches(3)]) for form in forms[:3]]
    assert all(torch.equal(each, labels[0]) for each in labels)
    assert labels[0].tolist() == [item.get("labels", -1) for item in items]
    with pytest.raises(InvalidInput, match=rf"rename one to one of {key}, "):
        images_for(adopted, [{"something": items[0][key][None]}])


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_a_masked_model_is_the_smaller_one_and_padding_changes_nothing(name: str) -> None:
    model, items = made(name)
    adopted = accepting(rx.load(model.double()), CASES[name][2])
    items = [{key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
              for key, value in item.items()} for item in items]  # fmt: skip
    prescription = rx.prescribe(
        rx.diagnose(adopted, batched(items, 4)), "qk=total_rank:0.5 vo=total_rank:0.5 hidden=total_rank:0.5"
    )
    small, masked = (rx.realize(adopted, prescription, by=by) for by in ("compress", "mask"))
    (batch,) = batched(items, len(items))
    expected = answer(small(**without_labels(batch)))
    torch.testing.assert_close(answer(masked(**without_labels(batch))), expected, rtol=0, atol=1e-10)
    if name == "padded patches":
        other = batch["pixel_values"] + 5 * (batch["pixel_attention_mask"][..., None] == 0)
        torch.testing.assert_close(answer(small(**{**batch, "pixel_values": other})), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_shrink_takes_the_loader(name: str, tmp_path: Path) -> None:
    model, items = made(name, 24)
    result = rx.shrink(model, torch.utils.data.DataLoader(items, batch_size=4), macs=0.8)  # type: ignore[arg-type]
    assert family_of(result.model).input_shape(result.model) == CASES[name][2]
    assert ("labels" in items[0]) == any(finding.check == "accuracy" for finding in result.evidence.findings)
    batch = without_labels(batched(items, 4)[0])
    result.save(tmp_path / "slim", onnx=False)
    loaded: Any = rx.load(tmp_path / "slim")
    with torch.no_grad():
        expected = answer(result.model(**batch))
        torch.testing.assert_close(answer(loaded(**batch)), expected, rtol=0, atol=0)
    rx.verify(tmp_path / "slim", rx.load(model), batched(items, 4), "fidelity,costs")
    if name == "padded patches":
        with pytest.raises(NotSupported, match="onnx=False"):
            rx.export(result.model, tmp_path / "model.onnx")
        return
    pytest.importorskip("onnxruntime")
    file = rx.export(result.model, tmp_path / "model.onnx")
    images = next(iter(images_for(result.model, items).batches(4))).images
    torch.testing.assert_close(file(images), expected, rtol=0, atol=1e-4)
