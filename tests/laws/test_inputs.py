"""Loaders yield what a model's own library takes: videos, spectrograms, and padded patches with their mask."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnrx as rx
from attnrx.data.model_data import images_for
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.vit import models
from attnrx.vit.models import accepting, family_of, working_copy
from support.pretrained import of_hf, shaken
from support.users_models import CLASSES, WIDTH, of_timm, of_transformers

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
    "padded patches, classified": (
        lambda: of_hf("Siglip2ForImageClassification", num_patches=16),
        lambda index: {**padded(index), "labels": index % 5},
        (1, 16, 195),
    ),
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


class Pair(torch.nn.Module):
    """Two images through one tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = of_transformers("Dinov2Model"), torch.nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        features = [self.tower(images).last_hidden_state[:, 0] for images in (left, right)]
        return self.head(torch.cat(features, 1))


class OfBatch(torch.nn.Module):
    """A forward that takes the batch as the loader yields it: an image, a mask of its rows, words, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.words = of_timm(num_classes=0), torch.nn.Embedding(30, WIDTH)
        self.head = torch.nn.Linear(WIDTH + 1, CLASSES)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        features = self.vit(batch["image"] * batch["mask"][:, None, :, None]) + self.words(batch["text"]["ids"]).mean(1)
        return self.head(torch.cat([features, batch["age"][:, None]], 1))


class OfFrames(torch.nn.Module):
    """The mean over the frames of a video."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = of_timm(num_classes=0)
        self.head = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        return self.head(self.vit(video.flatten(0, 1)).unflatten(0, video.shape[:2]).mean(1))


class Tiles(torch.nn.Module):
    """Four tiles of every image as one batch of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = of_timm(num_classes=0, img_size=16), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tiles = images.unflatten(3, (2, -1)).unflatten(2, (2, -1)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
        return self.head(self.tower(tiles).unflatten(0, (len(images), 4)).amax(1))


class Volumes(torch.nn.Module):
    """A Vision Transformer of volumes, whose head reads the patches after two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv3d(1, WIDTH, 4, 4)
        self.first, self.places = (
            torch.nn.Parameter(torch.randn(1, 1, WIDTH)),
            torch.nn.Parameter(torch.randn(28, WIDTH)),
        )
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, volumes: torch.Tensor) -> torch.Tensor:
        patches = self.patches(volumes).flatten(2).mT
        tokens, taps = torch.cat([self.first.expand(len(volumes), -1, -1), patches], 1) + self.places, []
        for index, block in enumerate(self.blocks):
            tokens = block(tokens)
            taps += [self.norm(tokens)[:, 1:].mean(1)] if index in (1, 3) else []
        return self.head(torch.cat(taps, 1))


class Block(torch.nn.Module):
    """A block whose attention is called by the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 40), torch.nn.GELU(), torch.nn.Linear(40, WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        entering = self.norms[0](tokens)
        tokens = tokens + self.attention(key=entering, value=entering, query=entering, need_weights=False)[0]
        return tokens + self.mlp(self.norms[1](tokens))


class Series(torch.nn.Module):
    """All channels of a series as sequences of one encoder, as PatchTST has them."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 40, 0.0, "gelu", batch_first=True, norm_first=True)
        self.patches, self.places = torch.nn.Linear(8, WIDTH), torch.nn.Parameter(torch.randn(6, WIDTH))
        self.encoder = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = torch.nn.Linear(6 * WIDTH, CLASSES)

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        patches = past.mT.unfold(-1, 8, 8).flatten(0, 1)
        tokens = self.encoder(self.patches(patches) + self.places)
        return self.head(tokens.flatten(1)).unflatten(0, (len(past), -1)).mean(1)


class Points(torch.nn.Module):
    """Groups of points and their centres, whose positions are added before every block."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.places = torch.nn.Linear(24, WIDTH), torch.nn.Linear(3, WIDTH)
        self.blocks, self.head = torch.nn.ModuleList(Block() for _ in range(3)), torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, groups: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
        tokens, places = self.patches(groups.flatten(2)), self.places(centres)
        for block in self.blocks:
            tokens = block(tokens + places)
        return self.head(tokens.amax(1))


def patch_tst() -> Any:
    """Its blocks are called with all channels of a series at once, and make sequences of them."""
    sizes: dict[str, Any] = {"d_model": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 3, "ffn_dim": 40}
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=48, patch_length=8, patch_stride=8, num_targets=CLASSES, **sizes
    )
    return transformers.PatchTSTForClassification(config)


def naflex() -> Any:
    timm = pytest.importorskip("timm")
    return timm.create_model(
        "naflexvit_base_patch16_gap", patch_size=8, embed_dim=WIDTH, depth=3, num_heads=2, num_classes=CLASSES
    )


def of_naflex(index: int) -> tuple[dict[str, torch.Tensor], int]:
    """An item of timm's NaFlex collator."""
    height, width = GRIDS[index % 4]
    coordinates, valid = torch.zeros(16, 2, dtype=torch.long), torch.arange(16) < height * width
    coordinates[: height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
    patches = numbers(16, 192, seed=index) * valid[:, None]
    return {"patches": patches, "patch_coord": coordinates, "patch_valid": valid}, index % CLASSES


# The function that makes the model, the items of its loader, and what the forward takes of a batch.
OTHER_INPUTS: dict[str, tuple[Callable[[], Any], Callable[[int], Any], Callable[[Any], Any]]] = {
    "pair": (
        Pair,
        lambda index: {"a": numbers(3, 32, 32, seed=index), "b": numbers(3, 32, 32, seed=-index), "label": index % 5},
        lambda batch: (batch["a"], batch["b"]),
    ),
    "batch": (
        OfBatch,
        lambda index: {
            "image": numbers(3, 32, 32, seed=index), "mask": numbers(32, seed=index) > -1,
            "text": {"ids": torch.randint(30, (4,), generator=torch.Generator().manual_seed(index))},
            "age": numbers(1, seed=index)[0],
        },
        lambda batch: (batch,),
    ),
    "frames": (
        OfFrames, lambda index: (numbers(4, 3, 32, 32, seed=index), index % 5), lambda batch: {"video": batch[0]}
    ),
    "tiles": (Tiles, lambda index: (numbers(3, 32, 32, seed=index), index % 5), lambda batch: (batch[0],)),
    "volume": (Volumes, lambda index: (numbers(1, 12, 12, 12, seed=index), index % 5), lambda batch: (batch[0],)),
    "series": (Series, lambda index: (numbers(48, 3, seed=index), index % 5), lambda batch: (batch[0],)),
    "points": (
        Points, lambda index: (numbers(20, 8, 3, seed=index), numbers(20, 3, seed=-index)), lambda batch: tuple(batch)
    ),
    "series of transformers": (
        patch_tst, lambda index: (numbers(48, 3, seed=index), index % 5), lambda batch: {"past_values": batch[0]}
    ),
    "patches of timm": (naflex, of_naflex, lambda batch: (batch[0],)),
}  # fmt: skip


def called(model: Any, given: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(**given) if isinstance(given, dict) else model(*given)
    return output if isinstance(output, torch.Tensor) else output.prediction_logits


@pytest.mark.parametrize("name", OTHER_INPUTS)
def test_a_function_states_what_the_forward_takes(name: str, tmp_path: Path) -> None:
    make, item, inputs = OTHER_INPUTS[name]
    torch.manual_seed(0)
    model = shaken(make()).float()
    loader = torch.utils.data.DataLoader([item(index) for index in range(48)], batch_size=8)  # type: ignore[arg-type]
    given = inputs(next(iter(loader)))
    loaded = rx.load(model, inputs=given)
    torch.testing.assert_close(called(loaded, given), called(model, given), rtol=0, atol=1e-5)
    result = rx.shrink(model, loader, macs=0.85, inputs=inputs)
    before, after = (family_of(each).costs(each) for each in (loaded, result.model))
    assert after.macs <= 0.86 * before.macs
    assert any(finding.check == "fidelity" for finding in result.evidence.findings)
    assert called(result.model, given).shape == (8, CLASSES)
    result.save(tmp_path / "slim", onnx=False)
    again: Any = rx.load(tmp_path / "slim")
    torch.testing.assert_close(called(again, given), called(result.model, given), rtol=0, atol=0)
    assert family_of(again).costs(again) == after


AXES = ("qk=total_rank:0.5", "vo=total_rank:0.5", "heads=uniform_rank:0.5", "hidden=uniform_rank:0.5")
# What no token may leave, and what the refusal says.
ALL_TOKENS = {"points": "needs all tokens between its blocks", "series of transformers": "sequences inside its blocks"}


@pytest.mark.parametrize("name", ["volume", "series", "points", "series of transformers"])
def test_a_model_of_other_inputs_has_all_axes(name: str) -> None:
    make, item, inputs = OTHER_INPUTS[name]
    torch.manual_seed(0)
    batch = next(iter(torch.utils.data.DataLoader([item(index) for index in range(24)], batch_size=24)))  # type: ignore[arg-type]
    given = inputs(batch)
    loaded = rx.load(shaken(make()).float(), inputs=given)
    packed: Any = family_of(loaded).inputs(loaded)
    diagnosis = rx.diagnose(loaded, packed.packed(given), moments=True)
    for rules in (*AXES, "tokens=ward:0.5@2"):
        if "tokens" in rules and name in ALL_TOKENS:
            with pytest.raises(NotSupported, match=ALL_TOKENS[name]):
                rx.realize(loaded, rx.prescribe(diagnosis, rules))
            continue
        prescription = rx.prescribe(diagnosis, rules)
        small, masked = (rx.realize(loaded, prescription, by=by) for by in ("compress", "mask"))
        torch.testing.assert_close(called(small, given), called(masked, given), rtol=0, atol=1e-4)
        before, after = (family_of(each).costs(each) for each in (loaded, small))
        assert after.macs < before.macs and not torch.equal(called(small, given), called(loaded, given))
        assert not rx.verify(small, loaded, packed.packed(given), [rx.checks.Costs()]).failures, rules


@pytest.mark.parametrize("to", ["onnx", "program"])
@pytest.mark.parametrize("name", ["volume", "series", "frames"])
def test_a_file_takes_what_the_module_takes(name: str, to: str, tmp_path: Path) -> None:
    make, item, inputs = OTHER_INPUTS[name]
    torch.manual_seed(0)
    batch = next(iter(torch.utils.data.DataLoader([item(index) for index in range(8)], batch_size=8)))  # type: ignore[arg-type]
    given = inputs(batch)
    model = shaken(make()).float()
    loaded = rx.load(model, inputs=given)
    items = next(iter(given.values())) if isinstance(given, dict) else given[0]
    file = rx.export(loaded, tmp_path / f"model{'.onnx' if to == 'onnx' else '.pt2'}", to)
    again: Any = rx.load(file.path, trust=True)
    packed: Any = family_of(loaded).inputs(loaded)
    for each in (items, packed.packed(given), items[:3]):
        torch.testing.assert_close(again(each), called(model, given)[: len(each)], rtol=0, atol=1e-4)
    with pytest.raises(InvalidInput, match=str(items.shape[1])):
        again(items[:, 1:])
    if to == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(file.path)
        assert session.get_inputs()[0].shape[1:] == list(items.shape[1:])
        assert not list(tmp_path.glob("run_*.py"))


def test_a_file_of_volumes_has_convolutions_without_a_bias(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = Volumes()
    model.patches = torch.nn.Conv3d(1, WIDTH, 4, 4, bias=False)
    given = numbers(4, 1, 12, 12, 12)
    loaded = rx.load(shaken(model).float(), inputs=given)
    file = rx.export(loaded, tmp_path / "model.onnx")
    with torch.no_grad():
        torch.testing.assert_close(rx.load(file.path)(given), loaded(given), rtol=0, atol=1e-4)


def test_videos_of_a_model_without_a_reader(tmp_path: Path) -> None:
    config = transformers.TimesformerConfig(
        image_size=16, patch_size=8, num_frames=4, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=40, num_labels=CLASSES,
    )  # fmt: skip
    model = shaken(transformers.TimesformerForVideoClassification(config)).float()
    items = [{"pixel_values": numbers(4, 3, 16, 16, seed=index), "labels": index % CLASSES} for index in range(48)]
    loader = torch.utils.data.DataLoader(items, batch_size=8)  # type: ignore[arg-type]
    batch = without_labels(next(iter(loader)))
    result = rx.shrink(model, loader, macs=0.9)
    assert family_of(result.model).input_shape(result.model) == (12, 16, 16)
    assert any(finding.check == "accuracy" for finding in result.evidence.findings)
    result.save(tmp_path / "slim", onnx=False)
    with torch.no_grad():
        expected = result.model(**batch).logits
        torch.testing.assert_close(rx.load(tmp_path / "slim")(**batch).logits, expected, rtol=0, atol=0)
        assert float((expected - model(**batch).logits).abs().max()) < float(expected.std())


SIZES = (32, 32), (24, 40), (40, 16)


@pytest.mark.parametrize("library", ["transformers", "timm", "timm, one size"])
def test_a_loader_of_several_sizes(library: str) -> None:
    if library == "transformers":
        model = of_transformers("Dinov2ForImageClassification")
    else:
        model = of_timm(dynamic_img_size=library == "timm")
    batches = [
        (numbers(4, 3, *SIZES[min(index % 4, 2)], seed=index), torch.arange(4)) for index in range(32)
    ]  # half of them of the last size
    model = shaken(model).float()
    if "one size" in library:
        with pytest.raises(InvalidInput, match="resize them to one"):
            rx.shrink(model, batches, macs=0.8)
        return
    result = rx.shrink(model, batches, macs=0.8)
    other = [each for each in result.evidence.findings if each.details["quantity"].endswith("at other sizes")]
    assert len(other) == 2 and all(each.n == 64 and each.details["sizes"] == 2 for each in other)
    assert any("3 sizes" in note for note in result.evidence.about["notes"])
    with torch.no_grad():
        for images, _ in batches[:4]:
            outputs = result.model(images), model(images)
            found, expected = (getattr(output, "logits", output) for output in outputs)
            assert type(outputs[0]) is type(outputs[1]) and found.shape == expected.shape
    single = [(image, 0) for images, _ in batches for image in images]
    images: Any = images_for(result.model, single)
    assert [len(each) for each in (images, *images.others)] == [64, 32, 32]


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
        torch.testing.assert_close(models.answer(fitting, images), expected, rtol=0, atol=limit)
        torch.testing.assert_close(working_copy(fitting)(images), expected, rtol=0, atol=limit)
        if not name.startswith("padded patches"):
            inputs = next(iter(batch.values()))
            torch.testing.assert_close(answer(fitting(inputs)), expected, rtol=0, atol=limit)
            torch.testing.assert_close(working_copy(fitting)(inputs), expected, rtol=0, atol=limit)


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
    if not name.startswith("padded patches"):
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
    if name.startswith("padded patches"):
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
    if name.startswith("padded patches"):
        with pytest.raises(NotSupported, match="onnx=False"):
            rx.export(result.model, tmp_path / "model.onnx")
        return
    pytest.importorskip("onnxruntime")
    file = rx.export(result.model, tmp_path / "model.onnx")
    images = next(iter(images_for(result.model, items).batches(4))).images
    torch.testing.assert_close(file(images), expected, rtol=0, atol=1e-4)
