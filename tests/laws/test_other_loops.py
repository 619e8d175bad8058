"""Compressed models in the loops of others: timm's evaluation, the pipeline and the Trainer of transformers, compilers.

The models are saved, and reloaded in a process that never saw the original.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import nn

import attnrx as rx
from attnrx.vit.models import answer, family_of
from attnrx.vit.models.boundary.adoption import adopt
from support.pretrained import HF, TIMM, VIT, images_for, of_hf, of_timm

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

RULES = "qk=total_rank:0.6 vo=uniform_rank:0.5 fc1=uniform_rank:0.5 fc2=uniform_rank:0.5 tokens=evit:0.6@2,3"
SOURCES = {
    "timm": lambda: adopt(TIMM, of_timm(VIT, depth=3, img_size=32), mean=(0.4, 0.4, 0.4), std=(0.2, 0.2, 0.2)),
    "transformers": lambda: adopt(
        HF, of_hf("ViTForImageClassification", num_hidden_layers=3, image_size=32, id2label=dict(enumerate("vwxyz")))
    ),
}


def compressed(name: str) -> nn.Module:
    model = SOURCES[name]().float()
    images = images_for(model, 12)
    return rx.realize(model, rx.prescribe(rx.diagnose(model, images, batch_size=12), RULES)).eval()


def noise(model: nn.Module, count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(count, *family_of(model).input_shape(model), generator=generator, dtype=torch.float32)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.slow
def test_it_loads_where_the_original_was_never_seen(name: str, tmp_path: Path) -> None:
    small = compressed(name)
    images = noise(small)
    rx.save(small, tmp_path / "small")
    rx.serialization.write_tensors(tmp_path / "images.safetensors", {"images": images})
    script = (
        "import pathlib, sys, attnrx as rx; folder = pathlib.Path(sys.argv[1]);"
        "images = rx.serialization.read_tensors(folder / 'images.safetensors')['images'];"
        "outputs = rx.load(folder / 'small')(images); logits = getattr(outputs, 'logits', outputs);"
        "rx.serialization.write_tensors(folder / 'logits.safetensors', {'logits': logits})"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=300, env=environment)
    with torch.no_grad():
        found = rx.serialization.read_tensors(tmp_path / "logits.safetensors")["logits"]
        torch.testing.assert_close(found, answer(small, images), rtol=1e-5, atol=1e-6)


def test_timm_evaluates_it(tmp_path: Path) -> None:
    """The steps of timm's validate.py: the model says what images it takes, and a loader makes them."""
    rx.save(compressed("timm"), tmp_path / "small")
    small: Any = rx.load(tmp_path / "small")
    config = timm.data.resolve_model_data_config(small)
    assert config["input_size"] == (3, 32, 32) and config["mean"] == (0.4,) * 3 and config["std"] == (0.2,) * 3
    assert small.num_classes == 5 and small.default_cfg["architecture"] == VIT
    pixels = numpy.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=numpy.uint8)
    pictures = [(Image.fromarray(each), label) for label, each in enumerate(pixels)]
    transform = timm.data.create_transform(**{**config, "crop_pct": 1.0}, is_training=False)
    rows: Any = [(transform(image), label) for image, label in pictures]
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    with torch.no_grad():
        logits = torch.cat([small(images.float()) for images, _ in loader])
        labels = torch.cat([target for _, target in loader])
        top1, top5 = timm.utils.accuracy(logits, labels, topk=(1, 5))
        scaled = (torch.tensor(pixels).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.2
        torch.testing.assert_close(logits, small(scaled.float()), rtol=1e-4, atol=1e-4)
    assert 0 <= float(top1) <= 100 == float(top5)


def test_timm_gives_it_another_classifier_that_is_saved(tmp_path: Path) -> None:
    small: Any = compressed("timm")
    small.reset_classifier(7)
    assert small.num_classes == 7 and small(noise(small)).shape == (3, 7)
    rx.save(small.float(), tmp_path / "seven")
    again = rx.load(tmp_path / "seven")
    assert torch.equal(again(noise(again)), small(noise(small)))


@torch.no_grad()
def test_transformers_calls_it_by_position_and_by_name_with_labels_and_without() -> None:
    small: Any = compressed("transformers")
    images, labels = noise(small), torch.tensor([4, 0, 2])
    expected = answer(small, images)
    outputs = (small(images), small(pixel_values=images), small(pixel_values=images, labels=labels))
    assert [type(output) for output in outputs] == [transformers.modeling_outputs.ImageClassifierOutput] * 3
    assert all(torch.equal(output.logits, expected) for output in outputs)
    assert [output.loss is None for output in outputs] == [True, True, False]
    torch.testing.assert_close(outputs[2].loss, torch.nn.functional.cross_entropy(expected, labels))
    (as_tuple,) = small(pixel_values=images, return_dict=False)
    assert torch.equal(as_tuple, expected)


@pytest.mark.slow
def test_a_strict_export_and_one_compiled_graph_answer_alike() -> None:
    """In a process of its own: Dynamo does not follow the checks of shapes that the tests turn on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["timm", "strict", "compiled", "transformers", "strict", "compiled"]


if __name__ == "__main__":
    for each in SOURCES:
        print(each)
        tiny = compressed(each)
        with torch.no_grad():
            shapes = ({0: torch.export.Dim("batch", min=1)},)
            given = (noise(tiny, 2),)
            program = torch.export.export(tiny, given, dynamic_shapes=shapes if each == "timm" else None, strict=True)
            torch.testing.assert_close(program.module()(*given), tiny(*given), rtol=1e-4, atol=1e-5)
            print("strict")
            fast = torch.compile(tiny, fullgraph=True)
            torch.testing.assert_close(fast(noise(tiny)), tiny(noise(tiny)), rtol=1e-4, atol=1e-5)
            print("compiled")
