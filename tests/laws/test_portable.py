"""A portable model is loaded, run, trained and exported by its own library, in a process that cannot import attnrx."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import attnrx as rx
from attnrx.vit.models import model_fingerprint, stock_form
from attnrx.vit.models.boundary.stock import Stock
from attnrx.vit.models.libraries.huggingface_family import MAPS, READERS
from support import pretrained
from support.stock_models import MODELS, images, stock_model, tensors, transformers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

IN_PIPELINES = ("ViT", "DINOv2", "SigLIP", "CLIP")

# Loads folders by the code of their cards, where attnrx cannot be imported.
LOADING = """
import json, re, sys
from pathlib import Path
sys.modules["attnrx"] = None
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)

def tensors(output):
    if isinstance(output, dict):
        output = tuple(output.values())
    parts = output.to_tuple() if hasattr(output, "to_tuple") else output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor)]

def load(folder):
    code = re.search(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)
    expected = load_file(folder / "expected.safetensors")
    return names["model"].eval(), expected.pop("images"), [expected[str(index)] for index in range(len(expected))]

done = {}
"""
# What follows a deployment: outputs, a step of training, an export.
CHILD = f"""{LOADING}
for folder in map(Path, sys.argv[1:]):
    model, images, expected = load(folder)
    with torch.no_grad():
        found = tensors(model(images))
    equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
    program = torch.export.export(model, (images,)).module()
    exported = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tensors(program(images)), found))
    model.train()
    before = {{name: weight.clone() for name, weight in model.named_parameters()}}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors(model(images))[-1].square().mean().backward()
    optimizer.step()
    moved = any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ours = [name for name in sys.modules if name.partition(".")[0] == "attnrx" and sys.modules[name] is not None]
    done[folder.name] = {{"equal": equal, "exported": exported, "trained": moved, "ours": ours}}
print(json.dumps(done))
"""
# The tools of others, by their defaults; a pipeline of transformers has its own image processor.
TOOLS = f"""{LOADING}
import onnxruntime, openvino

def close(found, expected):
    found = [torch.as_tensor(part) for part in found]
    return len(found) == len(expected) and all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, expected))

def by_onnx(model, images):
    torch.onnx.export(model, (images,), "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {{session.get_inputs()[0].name: images.numpy()}})

def by_openvino(model, images):
    converted = openvino.convert_model(model, example_input=images)
    compiled = openvino.Core().compile_model(converted, "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})
    return [compiled(images.numpy())[index].copy() for index in range(len(converted.outputs))]

def by_compile(model, images):
    return tensors(torch.compile(model)(images))

def by_pipeline(folder, model):
    import numpy as np
    from PIL import Image
    from transformers import pipeline
    task = "image-classification" if type(model).__name__.endswith("Classification") else "image-feature-extraction"
    made = pipeline(task, model=str(folder))
    pixels = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    found = made(Image.fromarray(pixels))
    inputs = made.image_processor(Image.fromarray(pixels), return_tensors="pt")
    with torch.no_grad():
        answer = tensors(model(**inputs))[0]
    if task == "image-classification":
        return type(made.model) is type(model) and abs(found[0]["score"] - float(answer.softmax(-1).max())) < 1e-5
    return torch.allclose(torch.tensor(found), answer, atol=1e-5)

for folder in map(Path, sys.argv[1:]):
    model, images, expected = load(folder)
    with torch.no_grad():
        found = {{made.__name__: close(made(model, images), expected) for made in (by_onnx, by_openvino, by_compile)}}
    if type(model).__module__.startswith("transformers"):
        found["by_pipeline"] = by_pipeline(folder, model)
    done[folder.name] = found
print(json.dumps(done))
"""


def _shrunk(name: str, folder: Path) -> rx.Shrunk:
    model: Any = stock_model(name)
    if isinstance(model, transformers.PreTrainedModel):  # with an image processor, as users have it
        model.save_pretrained(folder)
        transformers.ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
        model = folder
    return rx.shrink(model, images(24), params=0.85, portable=True)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, rx.Shrunk]:
    """The results of the models that the selected tests are about."""
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {each.params["name"] for each in selected if each is not None}
    root = tmp_path_factory.mktemp("originals")
    return {name: _shrunk(name, root / name.replace(" ", "-")) for name in MODELS if name in names}


@pytest.fixture(scope="module")
def folders(results: dict[str, rx.Shrunk], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, inputs = tmp_path_factory.mktemp("portable"), images(3, 2)
    found = {}
    for name, shrunk in results.items():
        folder = found[name] = shrunk.save(root / name.replace(" ", "-"), onnx=False)
        with torch.no_grad():
            outputs = tensors(shrunk.model.eval()(inputs))
        expected = {str(index): part.contiguous() for index, part in enumerate(outputs)}
        save_file({**expected, "images": inputs}, folder / "expected.safetensors")
    return found


def _found_without_attnrx(code: str, folders: dict[str, Path], place: Path) -> dict[str, dict[str, Any]]:
    """Returns what a process that cannot import attnrx finds, by the names of the folders."""
    script = place / "child.py"
    script.write_text(code)
    command = [sys.executable, "-W", "ignore", str(script), *map(str, folders.values())]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    child = subprocess.run(command, capture_output=True, text=True, cwd=place, env=offline)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def without_attnrx(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return _found_without_attnrx(CHILD, folders, tmp_path_factory.mktemp("child"))


@pytest.fixture(scope="module")
def by_tools(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return _found_without_attnrx(TOOLS, folders, tmp_path_factory.mktemp("tools"))


@pytest.mark.parametrize("name", MODELS)
def test_its_own_library_loads_runs_exports_and_trains_it(name: str, without_attnrx: dict[str, dict[str, Any]]) -> None:
    found = without_attnrx[name.replace(" ", "-")]
    assert found == {"equal": True, "exported": True, "trained": True, "ours": []}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_tools_of_others_take_it(name: str, by_tools: dict[str, dict[str, Any]]) -> None:
    tools = ("by_onnx", "by_openvino", "by_compile", *(("by_pipeline",) if name in IN_PIPELINES else ()))
    assert by_tools[name.replace(" ", "-")] == dict.fromkeys(tools, True)


@pytest.mark.parametrize("name", MODELS)
def test_no_part_of_it_is_of_attnrx(name: str, results: dict[str, rx.Shrunk]) -> None:
    shrunk = results[name]
    assert shrunk.is_portable and type(shrunk.model) is type(MODELS[name](2))
    assert not [part for part in shrunk.model.modules() if type(part).__module__.startswith("attnrx")]
    counted = sum(weight.numel() for weight in shrunk.model.parameters())
    family = rx.models.family_of(shrunk.model)
    assert counted == family.costs(shrunk.model).params < sum(weight.numel() for weight in MODELS[name](2).parameters())
    assert shrunk.prescription is not None and {*shrunk.prescription.rules} <= {"hidden", "heads"}


@pytest.mark.parametrize("name", MODELS)
def test_attnrx_reads_the_same_folder(name: str, results: dict[str, rx.Shrunk], folders: dict[str, Path]) -> None:
    again, model, inputs = rx.load(folders[name]), results[name].model.eval(), images(3, 2)
    with torch.no_grad():
        for found, expected in zip(tensors(again(inputs)), tensors(model(inputs)), strict=True):
            assert torch.equal(found, expected)
    assert type(again) is type(model) and model_fingerprint(again) == model_fingerprint(model)
    rx.Evidence.load(folders[name] / "evidence.json").require(model_fingerprint(again), "the folder")


def test_widths_are_multiples_and_heads_are_whole(results: dict[str, rx.Shrunk]) -> None:
    widths = {
        name: {*rx.models.hidden_units(rx.models.family_of(found.model).mlp(found.model))}
        for name, found in results.items()
    }
    assert all(len(each) == 1 and not next(iter(each)) % 8 for each in widths.values()), widths


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.answer != MAPS])
def test_every_class_of_transformers_that_is_read_is_created_at_another_width(name: str) -> None:
    model = rx.load(pretrained.of_hf(name, hidden_size=24).float().eval())
    diagnosis = rx.diagnose(model, pretrained.images_for(model, 8), moments=True)
    small = rx.realize(model, rx.prescribe(diagnosis, "hidden=total_rank:24", portable=True))
    found = stock_form(small)
    assert type(found) is type(small) and not [part for part in found.modules() if "attnrx" in type(part).__module__]
    # The MLP of a pooling head follows the width, and is narrowed by `shrink`: here linear maps are replaced for it.
    changed = Stock(found).present()[1]
    assert all("head" in path or "mlp" in path for path in changed) and bool(changed) == name.startswith("Siglip")


def test_a_tower_of_open_clip_is_one_too(tmp_path: Path) -> None:
    open_clip = pytest.importorskip("open_clip")
    tower = open_clip.create_model("ViT-B-32", pretrained=None).visual
    model = rx.load(tower)
    diagnosis = rx.diagnose(model, torch.randn(8, 3, 224, 224), moments=True)
    small = rx.realize(model, rx.prescribe(diagnosis, "hidden=total_rank:0.5", portable=True))
    folder = rx.save(small, tmp_path / "tower", portable=True)
    assert json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]["mlp_ratio"] == 2.0
    names: dict[str, Any] = {}
    exec(rx.models.loading_code(rx.load(folder), folder), names)
    image = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(names["model"](image), small.eval()(image))
