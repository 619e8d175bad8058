"""A portable model is loaded, run, trained and exported by its own library, in a process that cannot import attnrx."""

import json
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
from attnrx.vit.models.libraries.huggingface_family import READERS
from support import pretrained
from support.stock_models import MODELS, images, stock_model, tensors

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

# Runs the code of a card, and what follows a deployment: outputs, a step of training, an export.
CHILD = """
import json, re, sys
from pathlib import Path
sys.modules["attnrx"] = None
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)

def tensors(output):
    parts = output.to_tuple() if hasattr(output, "to_tuple") else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor)]

done = {}
for folder in map(Path, sys.argv[1:]):
    code = re.search(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    names = {}
    exec(code.replace("path/to/this/folder", str(folder)), names)
    model, expected = names["model"], load_file(folder / "expected.safetensors")
    images = expected.pop("images")
    with torch.no_grad():
        found = tensors(model(images))
    equal = len(found) == len(expected) and all(torch.equal(part, expected[str(i)]) for i, part in enumerate(found))
    program = torch.export.export(model, (images,)).module()
    exported = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tensors(program(images)), found))
    model.train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tensors(model(images))[-1].square().mean().backward()
    optimizer.step()
    moved = any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    ours = [name for name in sys.modules if name.partition(".")[0] == "attnrx" and sys.modules[name] is not None]
    done[folder.name] = {"equal": equal, "exported": exported, "trained": moved, "ours": ours}
print(json.dumps(done))
"""


def _shrunk(name: str) -> rx.Shrunk:
    return rx.shrink(stock_model(name), images(24), params=0.85, portable=True)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, rx.Shrunk]:
    """The results of the models that the selected tests are about."""
    selected = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    names = {each.params["name"] for each in selected if each is not None}
    return {name: _shrunk(name) for name in MODELS if name in names}


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


@pytest.fixture(scope="module")
def without_attnrx(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process that cannot import attnrx finds, by the names of the folders."""
    script = tmp_path_factory.mktemp("child") / "child.py"
    script.write_text(CHILD)
    command = [sys.executable, "-W", "ignore", str(script), *map(str, folders.values())]
    child = subprocess.run(command, capture_output=True, text=True, cwd=script.parent)
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_its_own_library_loads_runs_exports_and_trains_it(name: str, without_attnrx: dict[str, dict[str, Any]]) -> None:
    found = without_attnrx[name.replace(" ", "-")]
    assert found == {"equal": True, "exported": True, "trained": True, "ours": []}


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


@pytest.mark.parametrize("name", [name for name in READERS if not name.endswith("Backbone")])
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
