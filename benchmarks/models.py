"""Writes docs/models.md: which models of timm, transformers, torchvision and open_clip attnrx adopts, on which axes.

python benchmarks/models.py [PAGE]

Every architecture is created on the meta device, without weights, and read by its family. The proof on random images,
which `attnrx.load` makes of every model, is not made here. A library that is not installed is left out.
"""

import importlib
import inspect
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support.errors import AttnrxError
from attnrx.vit.models import LIBRARIES
from attnrx.vit.models.adopted_family import AdoptedFamily

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
AXES = ("qk", "vo", "hidden", "tokens")
# Classes of transformers beside those that attnrx adopts, so that the page states why they are refused.
OTHER_CLASSES = (
    "SwinForImageClassification",
    "SegformerForSemanticSegmentation",
    "TimesformerForVideoClassification",
    "PvtForImageClassification",
    "LevitForImageClassification",
    "MobileViTForImageClassification",
)
INTRODUCTION = """# Supported models

`python benchmarks/models.py` writes this page: it creates every architecture without weights and reads it.
`attnrx.load` proves in addition that the copy returns the outputs of the model on random images. The axes are those of
a prescription: `qk` (score directions), `vo` (value dimensions), `hidden` (the maps and units of the MLP; also `fc1`
and `fc2`) and `tokens`. A model of any other library is read by a `Reader`
([Use a model of your own](how-to/own_model.md)).

A head that was replaced (`model.head = nn.Linear(192, 10)`, an `nn.Sequential` of layers, `nn.Identity()`) is read,
saved and loaded with the model. So is a module of your own that contains one of these models (a backbone with a
decoder, several outputs, an averaged model), or is one with a head of your own, made by its constructor or of a
subclass: `attnrx.load(module)` returns a copy of the whole, with the module in `.module`. Tensors of any shape, tuples
and dictionaries are compared by the squared error relative to their variance, or by a `divergence` and a `metric` of
yours ([A segmentation model](how-to/segmentation.md)). A saved folder creates the module by its
class where that takes no arguments, else by `attnrx.load(folder, factory="module:function")`; `save` says which.

`load(model, image_size=(280, 210))` makes a model for images of another size, or rectangles: position embeddings are
interpolated by the code of the library (timm's `set_input_size` or `dynamic_img_size`, `interpolate_pos_encoding` of
transformers, torchvision's `interpolate_embeddings` for squares), and costs, plans and files state that size. `shrink`
and `elastic` take the size of the images that they are given. Saved folders and smaller models can be loaded at another
size too; a token policy keeps the same shares of the patches. Refused: timm's models with a bias for every pair of
tokens (create them with `img_size=...`), DPT, YOLOS, `CLIPForImageClassification`, open_clip, and sizes that patches do
not tile.

A model of timm with `dynamic_img_size=True`, and DINOv2 and DINOv3 of transformers, take images of any size that their
patches tile in every call, after shrinking too: ranks are those of the model, and a token policy keeps its shares of
the patches of each image. Their costs, plans and files are those of one size, `image_size`.
"""


@dataclass(frozen=True)
class Outcome:
    """The class of one architecture, and the axes that work or the reason why it is refused."""

    kind: str
    axes: tuple[str, ...]
    reason: str = ""


def outcome_of(family: AdoptedFamily, model: nn.Module) -> Outcome:
    """Returns the axes of a model on the meta device, or the refusal of its family."""
    kind = type(model).__name__
    try:
        adopted = family.outline(model)
    except AttnrxError as error:
        # Only the reason: the page has a column for the class.
        message = str(error).partition(" is not supported: ")[2] or str(error)
        return Outcome(kind, (), message.partition(". ")[0].removesuffix("."))  # without the remedies
    # An axis works if it does in every layer.
    specs = [layer.spec for layer in family.attention(adopted)]
    works = {
        "qk": not any(spec.fixes_scores for spec in specs),
        "vo": not any(spec.fixes_values for spec in specs),
        "hidden": bool(family.mlp(adopted)),
        "tokens": family.parts(adopted.source).pooling in ("class", "mean"),
    }
    return Outcome(kind, tuple(axis for axis in AXES if works[axis]))


def of_timm() -> Iterator[tuple[int, Outcome]]:
    """Yields every architecture with pretrained weights that has attention, with the number of its weight files."""
    timm: Any = importlib.import_module("timm")
    # Names are ARCHITECTURE.TAG, one for each file of weights.
    tags = Counter(name.partition(".")[0] for name in timm.list_models(pretrained=True))
    for module in timm.list_modules():
        # By the source first, so that the many architectures of timm without attention are not created.
        if "Attention" not in inspect.getsource(importlib.import_module(f"timm.models.{module}")):
            continue
        for name in set(timm.list_models(module=module)) & tags.keys():
            model = timm.create_model(name)
            if any("Att" in type(part).__name__ for part in model.modules()):
                yield tags[name], outcome_of(LIBRARIES["timm"], model)


def of_transformers() -> Iterator[tuple[int, Outcome]]:
    """Yields the classes with a reader, in their default configuration, and OTHER_CLASSES."""
    transformers: Any = importlib.import_module("transformers")
    readers = importlib.import_module("attnrx.vit.models.huggingface_readers").READERS
    for name in (*readers, *OTHER_CLASSES):
        kind = getattr(transformers, name)
        # The masking of MAE removes patches at random, and a hybrid DPT has a convolutional backbone.
        changes = {"mask_ratio": 0.0} if name == "ViTMAEModel" else {}
        config = kind.config_class(**changes)
        if name == "DPTForDepthEstimation":
            config.is_hybrid = False
        yield 1, outcome_of(LIBRARIES["hf"], kind(config))


def of_torchvision() -> Iterator[tuple[int, Outcome]]:
    """Yields the image classifiers with attention."""
    models: Any = importlib.import_module("torchvision.models")
    for name in models.list_models(module=models, include=["vit_*", "swin_*", "maxvit_*"]):
        yield 1, outcome_of(LIBRARIES["torchvision"], models.get_model(name))


def of_open_clip() -> Iterator[tuple[int, Outcome]]:
    """Yields the image towers; one that wraps a model of timm is read as that model."""
    open_clip: Any = importlib.import_module("open_clip")
    for name in open_clip.list_models():
        tower = LIBRARIES["open_clip"].initialized(name)
        trunk = getattr(tower, "trunk", None)
        if trunk is None:
            yield 1, outcome_of(LIBRARIES["open_clip"], tower)
        else:
            outcome = outcome_of(LIBRARIES["timm"], trunk)
            yield 1, Outcome(f"{outcome.kind} of timm (visual.trunk)", outcome.axes, outcome.reason)


SOURCES: dict[str, tuple[str, str, Callable[[], Iterator[tuple[int, Outcome]]]]] = {
    "timm": ("timm", "weight files", of_timm),
    "transformers": ("transformers", "classes", of_transformers),
    "torchvision": ("torchvision", "architectures", of_torchvision),
    "open_clip": ("open_clip_torch", "configurations", of_open_clip),
}


def section(library: str, package: str, unit: str, outcomes: list[tuple[int, Outcome]]) -> str:
    """Returns the section of one library: its counts, and a table of its classes."""
    total = sum(count for count, _ in outcomes)
    adopted = sum(count for count, outcome in outcomes if not outcome.reason)
    rows: dict[Outcome, int] = defaultdict(int)
    for count, outcome in outcomes:
        rows[outcome] += count
    lines = [
        f"## {library}",
        "",
        f"{adopted} of {total} {unit} with attention are read ({package} {version(package)}).",
        "",
        f"| class | {unit} | {' | '.join(AXES)} | refused because |",
        f"|---|--:|{':-:|' * len(AXES)}---|",
    ]
    # Supported classes first, then by name.
    for outcome, count in sorted(rows.items(), key=lambda row: (bool(row[0].reason), row[0].kind, -row[1])):
        marks = " | ".join("yes" if axis in outcome.axes else "" for axis in AXES)
        lines.append(f"| {outcome.kind} | {count} | {marks} | {outcome.reason} |")
    return "\n".join(lines) + "\n"


def main(page: Path) -> None:
    parts = [INTRODUCTION]
    for library, (package, unit, read) in SOURCES.items():
        try:
            importlib.import_module(library)
        except ModuleNotFoundError:
            print(f"{library} is not installed: its section is left out")
            continue
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            parts.append(section(library, package, unit, list(read())))
    page.write_text("\n".join(parts))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE)
