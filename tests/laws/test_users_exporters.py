"""Users' own exporters on smaller models: torch.export, torch.jit.trace, both exporters of torch for ONNX, OpenVINO."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx
from attnrx.support.errors import NotSupported
from support.cases import CONFIGS
from support.cases import model as model_of
from support.pretrained import BEIT, OWN, VIT, OwnViT, of_hf, of_timm, of_torchvision, shaken

pytestmark = [
    pytest.mark.filterwarnings("ignore::attnrx.support.errors.ScaleWarning"),
    pytest.mark.usefixtures("single_precision"),
]

DEEP = {"num_hidden_layers": 3}
ORIGINALS: Mapping[str, Callable[[], nn.Module]] = {
    "timm": lambda: of_timm(VIT, depth=3).float(),
    "hf": lambda: of_hf("ViTForImageClassification", **DEEP).float(),
    "rotary": lambda: of_timm("eva02_tiny_patch14_224", depth=3).float(),
    "biases": lambda: of_timm(BEIT, depth=3).float(),
    "torchvision": lambda: of_torchvision(num_layers=3).float(),
    "module": lambda: shaken(OwnViT()).float(),
}  # fmt: skip
MODELS = (*ORIGINALS, "own")
RULES = {
    "unchanged": "",
    "ranks": "qk=total_rank:0.7",
    "maps": "qk=total_rank:0.7 vo=total_rank:0.7 hidden=uniform_rank:0.6",
    "pruned": "tokens=attention_received:0.7@2",
    "merged": "qk=total_rank:0.7 tokens=tome:1@every",
    "ward": "tokens=ward:0.6@2",
}


class Logits(nn.Module):
    """A model of transformers that returns a tensor, as its users wrap one for an exporter."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images).logits


def loaded(kind: str) -> nn.Module:
    if kind == "own":
        return model_of(CONFIGS["svda-deep"]).float()
    return attnrx.load(ORIGINALS[kind](), reader=OWN if kind == "module" else None)


def program(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    return torch.export.export(model, (images,)).module()(images)


def dynamic_program(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    return torch.export.export(model, (images,), dynamic_shapes=shapes).module()(images[:1])


def traced(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    module: Any = torch.jit.trace(model, images)
    return module(images)


def _run(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    return torch.tensor(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def onnx(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    pytest.importorskip("onnxscript")
    exported: Any = torch.onnx.export(model, (images,), dynamo=True, verbose=False)
    exported.save(folder / "model.onnx")
    return _run(folder / "model.onnx", images)


def torchscript_onnx(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    pytest.importorskip("onnx")
    torch.onnx.export(model, (images,), folder / "model.onnx", dynamo=False)
    return _run(folder / "model.onnx", images)


def openvino(model: nn.Module, images: torch.Tensor, folder: Path) -> torch.Tensor:
    library = pytest.importorskip("openvino")
    converted = library.convert_model(model, example_input=images)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    return torch.tensor(library.compile_model(converted, "CPU", exact)(images.numpy())[0])


FUNCTIONS = (program, dynamic_program, traced, onnx, torchscript_onnx, openvino)
EXPORTERS = {function.__name__: function for function in FUNCTIONS}
QUICK = {("timm", "maps", "program"), ("hf", "merged", "traced"), ("own", "pruned", "dynamic_program")}
CASES = [
    pytest.param(*case, id="-".join(case), marks=[] if case in QUICK else [pytest.mark.slow])
    # A third of the pairs of a rule and an exporter with timm's model, a ninth with the others.
    for case in (
        (kind, rules, by)
        for row, kind in enumerate(MODELS)
        for column, rules in enumerate(RULES)
        for number, by in enumerate(EXPORTERS)
        if (row + column + number) % (3 if kind == "timm" else 9) == 0 or (kind, rules, by) in QUICK
    )
]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(("kind", "rules", "by"), CASES)
def test_users_exporters_give_the_same_outputs(kind: str, rules: str, by: str, tmp_path: Path) -> None:
    model = loaded(kind)
    shape = attnrx.models.family_of(model).input_shape(model)
    images = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    if RULES[rules]:
        # The MLP of EVA has a gate: its hidden units are no axis.
        text = RULES[rules].partition(" hidden")[0] if kind == "rotary" else RULES[rules]
        given = attnrx.prescribe(attnrx.diagnose(model, images, moments=True), text)
        model = attnrx.realize(model, given).eval()
    model = Logits(model) if kind == "hf" else model
    with torch.no_grad():
        expected = model(images)
    if by == "torchscript_onnx" and "tokens" in RULES[rules]:
        with pytest.raises(NotSupported, match="dynamo=True"):
            EXPORTERS[by](model, images, tmp_path)
        return
    # With gradients torch's exporter does not convert timm's own BEiT either.
    gradients = len(rules) % 2 == 0 and (kind, by) != ("biases", "onnx")
    with torch.set_grad_enabled(gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters
        actual = EXPORTERS[by](model, images, tmp_path)
    torch.testing.assert_close(actual.detach(), expected[: len(actual)], atol=1e-4, rtol=1e-3)


def quantized(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("kind", MODELS)
def test_half_a_quantization_is_refused(kind: str) -> None:
    model = loaded(kind)
    images = torch.randn(4, *attnrx.models.family_of(model).input_shape(model))
    small = attnrx.realize(model, attnrx.prescribe(attnrx.diagnose(model, images), RULES["ranks"]))
    with pytest.raises(NotSupported, match=r"attnrx\.export"):
        quantized(small)


# BEiT and EVA of timm read the weights of their parts, which a quantized part does not have.
@pytest.mark.parametrize("kind", ["timm", "hf", "torchvision", "module"])
def test_a_model_that_was_only_loaded_is_quantized_as_its_library_does_it(kind: str) -> None:
    model = loaded(kind)
    images = torch.randn(4, *attnrx.models.family_of(model).input_shape(model))
    both = (quantized(each) for each in (ORIGINALS[kind](), model))
    with torch.no_grad():
        expected, found = ((Logits(each) if kind == "hf" else each)(images) for each in both)
    assert torch.equal(found, expected)
