"""Users' own modules around a Vision Transformer: adopted, realized, saved, loaded and shrunk as a whole."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.show.checks import Fidelity
from attnrx.support.errors import DataError, FactoryWarning, NotSupported
from attnrx.support.modules import tensors_of
from attnrx.vit.costs import count_product_macs
from attnrx.vit.models import answer, family_of, library_form, working_copy
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.outputs import output_kind_of
from support.comparisons import assert_same_tensors
from support.users_models import Around

timm = pytest.importorskip("timm")
pytestmark = [
    pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning"),
    pytest.mark.filterwarnings("ignore::attnrx.support.errors.FactoryWarning"),
]
SIZE, WIDTH = 16, 32
SMALL: dict[str, Any] = {"img_size": SIZE, "patch_size": 8, "embed_dim": WIDTH, "depth": 3, "num_heads": 2}
IMAGES = torch.randn(5, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def trunk(**options: Any) -> Any:
    return timm.create_model("vit_tiny_patch16_224", pretrained=False, **SMALL, **options)


def dinov2() -> Any:
    from transformers import Dinov2Config, Dinov2Model

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    return Dinov2Model(Dinov2Config(**sizes, image_size=SIZE))


class Cosine(nn.Module):
    """A head of the user's own: cosines with the vectors of classes."""

    def __init__(self):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return 5 * nn.functional.normalize(features, dim=-1) @ nn.functional.normalize(self.vectors, dim=-1).T


class Saliency(nn.Module):
    """A map of the patch features of a backbone of transformers."""

    def __init__(self):
        super().__init__()
        self.backbone = dinov2()
        self.decoder = nn.ConvTranspose2d(WIDTH, 1, 8, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        height, width = images.shape[2:]
        features = self.backbone(images).last_hidden_state[:, 1:]
        grid = features.transpose(1, 2).reshape(-1, WIDTH, height // 8, width // 8)
        return self.decoder(grid).sigmoid()


class Multitask(nn.Module):
    """Classes and a map, in a dictionary, with an argument that is optional."""

    def __init__(self):
        super().__init__()
        self.vit = trunk(num_classes=0)
        self.classes, self.depth = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, 1)

    def forward(self, images: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        tokens = self.vit.forward_features(images)
        return {"classes": self.classes(tokens[:, 0]), "depth": scale * self.depth(tokens[:, 1:])}


class Pyramid(nn.Module):
    """A tuple, of features after several blocks."""

    def __init__(self):
        super().__init__()
        self.vit = trunk(num_classes=0)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.vit.forward_intermediates(images, indices=[0, 2], intermediates_only=True))


class Masked(timm.models.vision_transformer.VisionTransformer):
    """A subclass whose forward is another one."""

    def __init__(self):
        super().__init__(**SMALL, num_classes=0)
        self.reconstruction = nn.Linear(WIDTH, 192)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.reconstruction(self.forward_features(images)[:, 1:])


def own_head() -> Any:
    model = trunk()
    model.head = Cosine()
    return model


def own_head_of_transformers() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
    model: Any = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=64, image_size=SIZE))
    model.classifier = Cosine()
    return model


def averaged() -> Any:
    return torch.optim.swa_utils.AveragedModel(trunk(num_classes=4))


def other_norm() -> Any:
    model = trunk()
    model.blocks[0].norm1 = nn.LayerNorm(WIDTH, eps=0.1)
    return model


# The function that makes the module, and the kind of its outputs.
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "own head": (own_head, "embedding"),
    "own head of transformers": (own_head_of_transformers, "embedding"),
    "constructor": (lambda: timm.models.vision_transformer.VisionTransformer(**SMALL, num_classes=6), "logits"),
    "other norm": (other_norm, "logits"),
    "subclass": (Masked, "map"),
    "sequence": (lambda: nn.Sequential(trunk(num_classes=0), nn.Linear(WIDTH, 3)), "logits"),
    "averaged": (averaged, "logits"),
    "map": (Saliency, "map"),
    "dictionary": (Multitask, "several"),
    "tuple": (Pyramid, "several"),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = CASES[name][0]().double()
    for parameter in model.parameters():  # timm's fresh head is zero
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def outputs(model: nn.Module, images: torch.Tensor = IMAGES) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return tensors_of(answer(model, images))


@pytest.mark.parametrize("name", CASES)
def test_a_module_keeps_its_outputs_and_is_realized_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = made(name)
    before = copy.deepcopy(model.state_dict())
    expected = outputs(model)
    whole = rx.load(model, factory=lambda: made(name))
    assert type(whole) is type(model) and isinstance(working_copy(whole), Adopted)
    assert output_kind_of(whole).name == CASES[name][1]
    assert_same_tensors(outputs(whole), expected, 1e-10)
    none = {key: tensor[:0] for key, tensor in expected.items()}
    assert_same_tensors(
        outputs(working_copy(whole), IMAGES[:0]), none
    )  # which the code of some libraries cannot compute
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in before.items())
    diagnosis = rx.diagnose(whole, IMAGES)
    text = "qk=total_rank:0.5 vo=total_rank:0.5 hidden=total_rank:0.5 tokens=ward:0.75@2"
    prescription = rx.prescribe(diagnosis, text)
    slim, masked = rx.realize(whole, prescription), rx.realize(whole, prescription, by="mask")
    assert {key: tensor.shape for key, tensor in outputs(slim).items()} == {
        key: tensor.shape for key, tensor in expected.items()
    }
    assert type(slim) is type(masked) is type(model)
    assert_same_tensors(outputs(slim), outputs(masked), 1e-8)
    assert_same_tensors(outputs(working_copy(slim)), outputs(slim), 1e-8)
    assert_same_tensors(outputs(copy.deepcopy(slim)), outputs(slim))
    family = family_of(slim)
    assert family.costs(slim).params == sum(parameter.numel() for parameter in slim.parameters())
    assert family.costs(slim).macs < family.costs(whole).macs
    assert outputs(family.library_model(slim)).keys() == expected.keys()
    rx.save(slim, tmp_path / "slim")
    loaded = rx.load(tmp_path / "slim", factory=lambda: made(name))
    assert_same_tensors(outputs(loaded), outputs(slim))
    assert output_kind_of(loaded).name == output_kind_of(whole).name
    assert family_of(loaded).costs(loaded) == family.costs(slim)


@pytest.mark.parametrize("name", CASES)
def test_an_equal_model_is_equal_and_a_changed_one_is_not(name: str) -> None:
    whole = rx.load(made(name))
    images = torch.randn(24, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    changed = working_copy(copy.deepcopy(whole))
    with torch.no_grad():
        for layer in family_of(changed).attention(changed):
            layer.value.weight.mul_(-1)  # type: ignore[union-attr, operator]
    changed = library_form(changed)
    found = [rx.verify(each, whole, images, [Fidelity()]).findings for each in (copy.deepcopy(whole), changed)]
    same, different = (
        next(finding.value for finding in findings if finding.details["quantity"] == "divergence") for findings in found
    )
    assert same == pytest.approx(0, abs=1e-12) and different > 1e-3


def test_methods_arguments_and_copies_of_the_module_stay() -> None:
    model = made("dictionary")
    whole: Any = rx.load(model)
    with torch.no_grad():
        assert_same_tensors(tensors_of(whole(IMAGES, scale=2.0)), tensors_of(model(IMAGES, scale=2.0)), 1e-10)
        assert_same_tensors(tensors_of(whole(images=IMAGES)), tensors_of(model(IMAGES)), 1e-10)
    slim: Any = rx.realize(whole, rx.prescribe(rx.diagnose(whole, IMAGES), "tokens=ward:0.75@2"))
    assert_same_tensors(outputs(pickle.loads(pickle.dumps(slim))), outputs(slim))
    with torch.no_grad():
        scaled = slim(IMAGES, scale=2.0)["depth"]
    assert torch.equal(scaled, 2.0 * outputs(slim)["depth"])
    assert outputs(slim.half(), IMAGES.half())["classes"].dtype == torch.float16


def test_only_the_blocks_that_are_read_are_restored() -> None:
    wholes: dict[str, Any] = {name: rx.load(made(name)) for name in CASES}
    blocks = {name: whole.attnrx_record.around.read_blocks for name, whole in wholes.items()}
    assert blocks["map"] == blocks["dictionary"] == blocks["subclass"] == (2,)
    assert blocks["tuple"] == (0, 2)
    assert blocks["own head"] == blocks["sequence"] == blocks["averaged"] == ()


def test_the_family_of_a_module_is_that_of_its_vision_transformer() -> None:
    families = {"map": "huggingface", "sequence": "timm", "own head": "timm", "own head of transformers": "huggingface"}
    for name, family in families.items():
        working = working_copy(rx.load(made(name)))
        assert isinstance(working, Adopted) and family_of(working).name == family
        assert working.trunk is working.source.get_submodule(working.path)


def test_the_block_that_differs_is_named() -> None:
    class Doubled(timm.layers.Attention):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return 2 * super().forward(x, *args, **kwargs)

    model = made("sequence")
    model[0].blocks[1].attn.__class__ = Doubled
    with pytest.raises(NotSupported, match="The first block that differs is block 2 of 3"):
        rx.load(model)


def test_the_macs_around_the_backbone_are_counted() -> None:
    dense, several = (working_copy(rx.load(made(name))) for name in ("map", "dictionary"))
    assert isinstance(dense, Adopted) and isinstance(several, Adopted) and dense.around and several.around
    assert dense.around.macs == WIDTH * SIZE * SIZE  # the transposed convolution: 4 patches, 64 pixels each
    assert several.around.macs == WIDTH * (7 + 4)


def test_a_folder_says_what_it_needs(tmp_path: Path) -> None:
    rx.save(rx.load(made("dictionary")), tmp_path / "by class")
    assert output_kind_of(rx.load(tmp_path / "by class")).name == "several"  # the class is imported, without arguments
    with pytest.warns(FactoryWarning, match="factory=..."):
        rx.save(rx.load(made("own head")), tmp_path / "own")
    with pytest.raises(Exception, match="does not create this model"):
        rx.load(tmp_path / "own")
    named = f"{__name__}:own_head"
    with pytest.warns(FactoryWarning, match=named):
        rx.save(rx.load(made("own head"), factory=named), tmp_path / "named")
    assert named in (tmp_path / "named" / "README.md").read_text().replace("\\", "")
    assert_same_tensors(outputs(rx.load(tmp_path / "named", factory=named)), outputs(made("own head")), 1e-10)
    with pytest.raises(Exception, match="cannot be imported"):
        rx.load(tmp_path / "named", factory="no_such_module:function")


class AcrossImages(Multitask):
    def forward(self, images: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        found = super().forward(images, scale)
        return {"classes": found["classes"] - found["classes"].mean(0)}


class Failing(Multitask):
    def forward(self, images: torch.Tensor) -> Any:  # type: ignore[override]
        raise KeyError("of the user")


WRONG: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "compares images": (AcrossImages, "other outputs in a batch than alone"),
    "raises an error": (Failing, "raises KeyError"),
    "probabilities": (lambda: nn.Sequential(trunk(num_classes=4), nn.Softmax(-1)), "returns probabilities"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_modules_are_refused_by_name(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(NotSupported, match=message):
        rx.load(make().eval())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["map", "dictionary", "own head"])
def test_a_module_is_shrunk_as_a_whole(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model = made(name).float()
    images = torch.randn(128, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3)).float()
    shrunk = rx.shrink(
        model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images), batch_size=16), macs=0.8
    )
    found, expected = outputs(shrunk.model, images[:8]), outputs(model, images[:8])
    assert {key: tensor.shape for key, tensor in found.items()} == {key: each.shape for key, each in expected.items()}
    for key, tensor in expected.items():
        assert torch.corrcoef(torch.stack([tensor.flatten(), found[key].flatten()]))[0, 1] > 0.8
    shrunk.save(tmp_path / "slim")
    assert (tmp_path / "slim" / "report.html").exists()
    loaded = rx.load(tmp_path / "slim", factory=lambda: made(name).float())
    assert_same_tensors(outputs(loaded, images), outputs(shrunk.model, images))
    file = rx.load(tmp_path / "slim" / "model.onnx")
    assert_same_tensors(outputs(file, images[:8]), found, 1e-4)
    assert output_kind_of(file).name == output_kind_of(loaded).name


@pytest.mark.parametrize("to", ["onnx", "program", "openvino", "int8"])
@pytest.mark.parametrize("name", ["dictionary", "tuple"])
def test_a_file_has_every_output_by_its_name(name: str, to: str, tmp_path: Path) -> None:
    pytest.importorskip({"openvino": "openvino", "program": "torch"}.get(to, "onnxruntime"))
    whole: Any = rx.load(made(name).float())
    images = IMAGES.float()
    expected = outputs(whole, images)
    path = tmp_path / {"program": "model.pt2", "openvino": "model.xml"}.get(to, "model.onnx")
    options: dict[str, Any] = {"calibration": images.repeat(13, 1, 1, 1)} if to == "int8" else {}
    for batch in ("dynamic", 2):
        file = rx.export(whole, path, to=to, batch=batch, **options)
        for each in (file, rx.load(path, trust=to == "program")):
            assert_same_tensors(outputs(each, images), expected, 0.5 if to == "int8" else 1e-4)
            assert output_kind_of(each).name == "several"
            assert family_of(whole).matches(whole) and each.output_sizes == whole.attnrx_record.around.sizes
    found = rx.verify(file, whole, images.repeat(5, 1, 1, 1), [Fidelity()]).findings
    assert next(each.value for each in found if each.details["quantity"] == "divergence") < 0.05
    if to == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(str(path))
        assert [each.name for each in session.get_outputs()] == list(expected)


def shape_of(images: torch.Tensor) -> tuple[int, ...]:
    return len(images), SIZE, SIZE


class Lengths(Saliency):
    """A forward that reads the number of images by `len`."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).reshape(shape_of(images))


def test_a_file_takes_any_number_of_images_where_the_forward_calls_len(tmp_path: Path) -> None:
    whole = rx.load(Lengths().eval())
    file = rx.export(whole, tmp_path / "model.pt2", to="program")
    for count in (1, 5):
        assert_same_tensors(outputs(file, IMAGES[:count]), outputs(whole, IMAGES[:count]), 1e-8)
    assert "len" not in globals() and "forward" not in vars(whole)


@pytest.mark.parametrize("name", ["map", "dictionary"])
def test_a_module_takes_images_of_another_size(name: str, tmp_path: Path) -> None:
    whole: Any = rx.load(made(name), image_size=(24, 32))
    images = torch.randn(3, 3, 24, 32)
    assert whole.attnrx_record.around.sizes == {
        key: tensor[0].numel() for key, tensor in outputs(whole, images).items()
    }
    slim = rx.realize(whole, rx.prescribe(rx.diagnose(whole, images), "tokens=ward:0.5@2"))
    rx.save(slim, tmp_path / "slim")
    loaded = rx.load(tmp_path / "slim", factory=lambda: made(name))
    assert_same_tensors(outputs(loaded, images), outputs(slim, images))
    twin = outputs(family_of(loaded).library_model(loaded), images)
    assert {key: tensor.shape for key, tensor in twin.items()} == {
        key: tensor.shape for key, tensor in outputs(slim, images).items()
    }


def resizing(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.net(nn.functional.interpolate(images, (32, 32)))


def padding(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.net(nn.functional.pad(images, (0, -images.shape[3] % 16, 0, -images.shape[2] % 16)))


def pooling(module: Any, images: torch.Tensor) -> torch.Tensor:
    return module.net.forward_head(module.net.forward_features(nn.functional.adaptive_avg_pool2d(images, 32)))


@pytest.mark.parametrize(("run", "size"), [(resizing, (48, 40)), (padding, (28, 20)), (pooling, (64, 64))])
def test_a_module_that_resizes_inside_takes_images_of_another_size(
    run: Callable[[Any, torch.Tensor], torch.Tensor], size: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Around(run, num_classes=5, img_size=(32, 32)).double().eval()
    images = torch.randn(6, 3, *size, dtype=torch.float64)
    model = rx.load(module, image_size=size)
    family = family_of(model)
    assert family.input_shape(model) == (3, *size) and family.token_layout(model).patches == 16
    assert family.costs(model).product_macs == count_product_macs(module, images[:1])
    torch.testing.assert_close(model(images), module(images))
    assert rx.verify(model, model, images, "fidelity,costs").findings
    small = rx.realize(model, rx.prescribe(rx.diagnose(model, images), "hidden=total_rank:0.5 tokens=ward:0.75@2"))
    rx.save(small, tmp_path / "small")
    loaded = rx.load(tmp_path / "small", factory=lambda: module)
    assert torch.equal(loaded(images), small(images))
    assert family_of(loaded).input_shape(loaded) == (3, *size)
    with pytest.raises(DataError, match="the model takes 3 x"):
        rx.diagnose(model, torch.randn(4, 3, 17, 17, dtype=torch.float64))


@torch.no_grad()
def test_a_model_whose_copy_takes_its_own_image_size_only_is_proved_at_that_size() -> None:
    """timm's SAM interpolates relative positions for smaller images, so only its working copy refuses them."""
    sizes = {"img_size": 136, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "neck_chans": 8}
    model = timm.create_model("samvit_base_patch16", window_size=3, global_attn_indexes=(1,), **sizes).eval()
    images = torch.randn(2, 3, 136, 136)
    assert_same_tensors(outputs(rx.load(model), images), outputs(model, images), 1e-10)


class FixedGrid(nn.Module):
    """A head on a grid of `side` x `side` patches, although the backbone was created for larger images."""

    def __init__(self, side: int = 4) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8}
        self.backbone = transformers.Dinov2Model(transformers.Dinov2Config(image_size=160, **sizes))
        self.head, self.side = nn.Conv2d(24, 5, 1), side

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(images).last_hidden_state[:, 1:].mT.unflatten(2, (self.side, self.side)))


@torch.no_grad()
def test_a_module_that_refuses_the_size_of_its_backbone_is_loaded_at_another_size(tmp_path: Path) -> None:
    model, images = FixedGrid().eval(), torch.randn(8, 3, 32, 32)
    with pytest.raises(NotSupported, match=r"160, 160.* image_size="):
        rx.load(model)
    loaded = rx.load(model, image_size=32)
    assert_same_tensors(outputs(loaded, images), outputs(model, images), 1e-10)
    copy_of = working_copy(loaded)
    assert family_of(copy_of).input_shape(copy_of) == (3, 32, 32)
    assert family_of(copy_of).costs(copy_of).product_macs == count_product_macs(copy_of, images[:1])
    small = rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images), "tokens=ward:0.7@2"))
    rx.save(small, tmp_path)
    assert_same_tensors(outputs(rx.load(tmp_path, factory=FixedGrid), images), outputs(small, images))


def test_shrink_loads_such_a_module_at_the_size_of_its_data() -> None:
    images = torch.randn(96, 3, 32, 32)
    small = rx.shrink(FixedGrid().eval(), images, macs=0.8, effort="quick")
    assert small.model(images[:2]).shape == (2, 5, 4, 4)
