"""Writes docs/models.md, the list of adopted timm, transformers, torchvision and open_clip models with their axes.

python benchmarks/models.py [PAGE [OUTCOMES]] [--measure]

The script creates every architecture on the meta device, without weights, and reads its structure as `attnrx.load`
does. If attnrx has no reader for an architecture, the script finds the MLPs by their structure. A kind is a class
together with the first letters of a name. Only the smallest architecture of each kind is searched for MLPs, and the
others get its result. `attnrx.load` also compares outputs on random images, but this script does not. A library that
is not installed is omitted. Results are stored in the file OUTCOMES, one line of JSON per kind, and another call
resumes from it.

With --measure the script measures small models of many libraries with random weights (small_models.py), and replaces
only the section with their table. This takes minutes.
"""

import argparse
import importlib
import inspect
import json
import re
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import torch
from small_models import BATCH, SMALL_MODELS, SmallModel
from torch import nn

import attnrx as rx
from attnrx.support.errors import AttnrxError, NotSupported
from attnrx.support.modules import random_images, tensors_of
from attnrx.support.shapes import ImageBatch
from attnrx.vit.costs import count_product_macs
from attnrx.vit.models import LIBRARIES, family_of, working_copy
from attnrx.vit.models.boundary.working_copy import answer
from attnrx.vit.models.families import trunks_of
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.observation_hooks import counted_by_spec
from attnrx.vit.models.parts.record import Record
from attnrx.vit.models.users.units import UnitsFamily, separate_pairs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
AXES = ("qk", "vo", "hidden", "tokens")
# The page lists the transformers classes with a reader, the classes of these tasks, and further classes.
TASKS = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEMANTIC_SEGMENTATION", "DEPTH_ESTIMATION", "IMAGE_TO_IMAGE")
OTHER_CLASSES = ("SamVisionModel", "Sam2VisionModel", "DonutSwinModel", "Swin2SRModel")
# The columns that --measure adds to the axes.
COPY, MACS, RELOADED, ONNX = MEASURES = ("copy", "MACs", "reloads", "ONNX")
COLUMNS = (*AXES, *MEASURES)
RULES = {**{axis: f"{axis}=total_rank:0.75" for axis in ("qk", "vo", "hidden")}, "tokens": "tokens=ward:0.7@2"}
NOISE = 0.1  # at most, added to random weights, because libraries start biases at zero, and zeros would hide mistakes
TITLE = "## What was measured"
MEASURED = f"""{TITLE}

`python benchmarks/models.py --measure` creates a small model of every class below with random weights, and removes a
quarter of `qk`, `vo` and `hidden`, and 30 % of the tokens. `copy` is the largest difference between the outputs of
attnrx's layers and the library's, relative to their standard deviation. `MACs` compares the closed form with a count of
matrix products: "equal", or the ratios of both models. `reloads` states whether the smaller model has the same outputs,
bit for bit, after it is saved and loaded. `ONNX` states whether it has a file with its outputs, or why not.
"""
INTRODUCTION = """# Supported models

`python benchmarks/models.py` writes the tables below. It creates every architecture without weights and reads its
structure. When you load a model, `attnrx.load` also proves on random images that the copy returns your model's outputs.
The columns are the axes of a prescription: `qk` (score directions), `vo` (value dimensions), `hidden` (the maps and
units of the MLP, including `fc1` and `fc2`) and `tokens`. If no reader supports a model, it has only the axis `hidden`
and keeps the library's own attention. For such models, the table shows what was found in the smallest model of each
kind.

## The result is a model of your own class

A smaller model is your module: `type(small) is type(model)`. It keeps its keys, its call, its hooks and its methods.
You can do with it whatever you do with the original: write attributes, replace the head, freeze weights by name, put it
back into a larger model, train it with `Trainer`, add PEFT adapters, compile it.

| what was removed | what changes in the module |
|---|---|
| hidden units, ranks of the MLP | the shapes of its linear maps; a map of low rank is two maps, `first` and `second` |
| whole heads | the shapes of its projections, in timm's ViTs and most of transformers; elsewhere as in the next row |
| ranks of scores or values; a mask | attnrx attention replaces the library's: other keys, the same call |
| tokens | hooks on the blocks, a submodule `attnrx_tokens`; if attention weights merged tokens, attnrx attention |

A smaller model differs from the original in these ways:

- Replaced attention returns no attention weights and refuses masks. It contains no `nn.Linear`, so PEFT and torchao
  find only the maps outside attention. It has no dropout either, which matters only in training.
- `torch.fx` traces replaced attention as one call, and `torch.jit.script` refuses it. If a model prunes tokens, neither
  of them works, and gradient checkpointing does not work either. `torch.jit.trace` and `torch.export` work in both
  cases.
- With pruned tokens, `output_hidden_states=True` returns the states of all patches. If a transformers module captures
  hidden states, you cannot combine a token policy with `torch.compile`.
- `save_pretrained` writes what your module contains, but `from_pretrained` expects the original's shapes.
  `attnrx.save(small, folder)` and `attnrx.load(folder)` always work.
- `attnrx.accelerate(model)` returns a copy that computes in attnrx's kernels, for float32 inference on a CPU. The copy
  refuses training and new weights. `attnrx.plain(fast)` undoes the acceleration. `shrink(model, data, faster=1.6)`
  accelerates its result if the target is a latency in eager PyTorch on a CPU.

## Models of your own

Under two conditions, your own class has all axes without a `Reader`. Its blocks must have a fused projection, four
projections or `nn.MultiheadAttention`, and its parts must be called once per image. The repositories of DINO, DINOv2
and MAE, vit-pytorch, and `nn.TransformerEncoder` meet these conditions. For other classes, write a `Reader` ([Use a
model of your own](how-to/own_model.md)).

If you replaced the head (`model.head = nn.Linear(192, 10)`), attnrx reads, saves and loads the new head with the model.
You can also pass a module that contains a supported model: a backbone with a decoder, several outputs, an averaged
model. `attnrx.load(module)` returns a copy of the whole module. If the module has several towers, attnrx makes the
largest Vision Transformer smaller. The module may call this transformer several times in a forward pass (crops, tiles,
frames). The costs then include every call.

If outputs are tensors, tuples or dictionaries, attnrx compares them by the squared error relative to their variance.
You can also pass your own `divergence` and `metric` ([A segmentation model](how-to/segmentation.md)). When you load a
saved folder, attnrx creates the module from its class or its library. If this is impossible, `save` says so, and you
pass a factory: `attnrx.load(folder, factory="module:function")`.

Merge adapters, pruning masks and parametrizations into the weights before you call attnrx. Use PEFT's
`model.merge_and_unload()`, `torch.nn.utils.prune.remove` or `torch.nn.utils.parametrize.remove_parametrizations`.

## Images of other sizes

`load(model, image_size=(280, 210))` adapts a model to another image size, which need not be square. The library's own
code interpolates the position embeddings. `shrink` and `elastic` use the size of your images. You can load saved
folders and smaller models at another size too. A token policy then keeps the same shares of the patches. If you call a
transformers model yourself, pass `interpolate_pos_encoding=True`.

attnrx cannot change the image size of DPT, YOLOS, `CLIPForImageClassification` and open_clip models, and of timm models
with a bias for every pair of tokens. Create these models with `img_size=...`. The patches must tile the new size.

timm models with `dynamic_img_size=True`, and transformers' DINOv2 and DINOv3, accept a new size in every call if
patches tile it. They still accept new sizes after shrinking. One loader may mix sizes. attnrx plans and compares on the
most frequent size. The evidence also contains divergence and agreement at the other sizes.

## Other inputs

Some modules need more than images but have `get_image_features` or `encode_image` (CLIP with texts, a vision-language
model). attnrx plans and verifies such modules by their image features. You still call the smaller module with its own
arguments, and it returns the same kind of output as before.

For other modules, state what the forward takes. `shrink(module, loader, inputs=fn, macs=0.6)` calls the module with
`fn(batch)`, which is a tensor, a tuple or a mapping. Use this for pairs of images, images with texts or masks, and
timm's NaFlex patches (`inputs=lambda batch: (batch[0],)`). Labels are optional, and only a `metric` receives them. For
single steps, pass an example: `attnrx.load(module, inputs=fn(batch))`. attnrx can export a module that takes one
tensor. For other modules, use `torch.onnx.export`.

Every verb takes what the loader yields: `pixel_values` [batch, frames, channels, height, width] (VideoMAE, ViViT),
`input_values` [batch, time, mel] (AST), or SigLIP 2's padded patches with `pixel_attention_mask` and `spatial_shapes`.
You cannot export a smaller SigLIP 2, because transformers reads the grid of every image as Python integers.
"""


@dataclass(frozen=True)
class Outcome:
    """The class of one architecture, with the axes that attnrx can prune, or the reason why it refuses the model."""

    kind: str
    axes: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Architecture:
    """An architecture of a library, with the number of its weight files, its family and its kind.

    `outline` is the model on the meta device. `make` creates the model with weights.
    """

    count: int
    family: AdoptedFamily
    kind: str
    outline: nn.Module
    make: Callable[[], nn.Module]
    where: str = ""
    size: int = 0
    """The number of the model's parameters, stored because the outline is dropped to save memory."""


def outcome_of(family: AdoptedFamily, model: nn.Module) -> Outcome:
    """Returns the axes of a model on the meta device, or the reason why its family refuses it.

    If the family refuses the whole model, the result has the axes of a Vision Transformer inside it that can be read,
    because `attnrx.load` adopts such a part in the same way.
    """
    outcome = outcome_of_trunk(family, model)
    if outcome.reason:
        for path, inner in trunks_of(model):
            found = outcome_of_trunk(inner, model.get_submodule(path))
            if not found.reason:
                return replace(found, kind=outcome.kind)
    return outcome


def outcome_of_trunk(family: AdoptedFamily, model: nn.Module) -> Outcome:
    """Returns the axes of a family's model, or the reason why the family refuses it."""
    kind = type(model).__name__
    try:
        family.require_supported(model)
        adopted = family.working(model, Record(family.name, family.origin_inside(model)))
    except AttnrxError as error:
        return Outcome(kind, (), reason_of(error))
    # An axis works if it works in every layer.
    specs, parts = [layer.spec for layer in family.attention(adopted)], family.parts(adopted.trunk)
    works = {
        "qk": not any(spec.fixes_scores for spec in specs),
        "vo": not any(spec.fixes_values for spec in specs),
        "hidden": bool(family.mlp(adopted)),
        "tokens": parts.pooling in ("class", "mean") and (parts.grid_axis is None or len(parts.mlp) == 1),
    }
    return Outcome(kind, tuple(axis for axis in AXES if works[axis]))


def reason_of(error: AttnrxError) -> str:
    """Returns the reason in an error message, without the class and the remedy, which the page's column omits."""
    message = str(error).partition(" is not supported: ")[2] or str(error)
    return message.partition(". ")[0].removesuffix(".")


def by_structure(make: Callable[[], nn.Module]) -> tuple[tuple[str, ...], str]:
    """Finds the MLPs of a model with weights, as `attnrx.load` does. Returns its axes, or the reason if it has none."""
    with torch.device("cpu"):
        model = make().eval()
        try:
            pairs, _ = separate_pairs(model, UnitsFamily().origin_inside(model).input_shape)
        except Exception as error:  # the code of a library raises errors of any type
            return (), reason_of(error) if isinstance(error, AttnrxError) else f"{type(error).__name__}: {error}"
    return (("hidden",), "") if pairs else ((), "it has no MLP whose units are separate")


def outcomes_of(architectures: Iterable[Architecture], state: "State") -> list[tuple[Architecture, Outcome]]:
    """Returns the outcome of every architecture. If no reader exists, the smallest architecture of its kind decides."""
    found: list[tuple[Architecture, Outcome]] = []
    unread: dict[str, list[tuple[Architecture, Outcome]]] = defaultdict(list)
    for each in architectures:
        outcome = outcome_of(each.family, each.outline)
        outcome = replace(outcome, kind=outcome.kind + each.where)
        size = sum(parameter.numel() for parameter in each.outline.parameters())
        small = replace(each, outline=nn.Identity(), size=size)
        if not outcome.reason:
            found.append((small, outcome))
        else:
            unread[f"{outcome.kind} {each.kind}"].append((small, outcome))
    for kind, members in unread.items():
        make = min(members, key=lambda member: member[0].size)[0].make
        axes, reason = state.kept(kind, partial(by_structure, make))
        found += [(each, Outcome(outcome.kind, tuple(axes), reason)) for each, outcome in members]
    return found


class State:
    """A cache of results by name. With a path, each result is a line of this file, and another call resumes from it."""

    def __init__(self, path: Path | None):
        self.path = path
        lines = [] if path is None or not path.exists() else path.read_text().splitlines()
        self.known: dict[str, Any] = dict(map(json.loads, lines))

    def kept(self, name: str, find: Callable[[], Any]) -> Any:
        """Returns the result with this name. If the file does not contain it, the result is computed and added."""
        if name not in self.known:
            self.known[name] = find()
            print(name, self.known[name], flush=True)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps([name, self.known[name]]) + "\n")
        return self.known[name]


class Answering(nn.Module):
    """Wraps a library's model so that you can call it with images, whatever its own forward takes and returns."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: ImageBatch) -> Any:
        return answer(self.model, images)


def shaken(model: nn.Module) -> nn.Module:
    """Adds noise to all weights, in place, of a size with which activations keep theirs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            inputs = weight[0].numel() if weight.ndim > 1 else 1
            weight.add_(min(NOISE, inputs**-0.5) * torch.randn(weight.shape, generator=generator).to(weight))
    return model.eval()


def difference(expected: Any, found: Any) -> float:
    """Returns the largest difference between two outputs, relative to the standard deviation of the expected output."""
    pairs = zip(tensors_of(expected).values(), tensors_of(found).values(), strict=True)
    return max(float((a - b).abs().max() / a.double().std().clamp_min(1e-30)) for a, b in pairs)


def copied(model: nn.Module, images: ImageBatch) -> str:
    with torch.no_grad():
        return f"{difference(answer(model, images), answer(working_copy(model).eval(), images)):.0e}"


def counted(model: nn.Module, images: ImageBatch) -> float:
    """Returns the closed-form MACs, divided by the MACs that a forward pass counts."""
    with counted_by_spec(model, family_of(model)):
        return family_of(model).costs(model).product_macs / count_product_macs(Answering(model).eval(), images[:1])


def both_counted(model: nn.Module, small: nn.Module, images: ImageBatch) -> str:
    ratios = [counted(each, images) for each in (model, small)]
    return "equal" if ratios == [1, 1] else " and ".join(f"{ratio:.3f}" for ratio in ratios)


def reloaded(small: nn.Module, images: ImageBatch, factory: Callable[[], nn.Module]) -> str:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        rx.save(small, Path(folder) / "small")
        change = difference(
            answer(small, images), answer(rx.load(Path(folder) / "small", factory=factory).eval(), images)
        )
    return "yes" if not change else f"differs by {change:.0e}"


def exported(small: nn.Module, model: nn.Module) -> str:
    """States whether a smaller model has an ONNX file with its outputs. If not, also whether the original has one."""
    reason = refused(small)
    return f"no{', nor has the original' if refused(model) else ''}: {reason}" if reason else "yes"


def refused(model: nn.Module) -> str:
    """Returns why a model cannot be exported, or "" if it can be."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            rx.export(model, Path(folder) / "model.onnx")  # export itself compares the file with the model
        except Exception as error:  # the code of a library raises errors of any type
            return why(error)
    return ""


def pruned(model: nn.Module, diagnosis: Any, text: str) -> nn.Module:
    """Returns the smaller model of a prescription.

    Raises:
        NotSupported: The prescription cannot be realized, or the model has the same MACs as before.
    """
    small = rx.realize(model, rx.prescribe(diagnosis, text)).eval()
    before, after = (family_of(each).costs(each).product_macs for each in (model, small))
    if after >= before:
        raise NotSupported(f"{text} removes nothing.")
    return small


def has_axis(model: nn.Module, diagnosis: Any, rule: str) -> bool:
    try:
        pruned(model, diagnosis, rule)
    except NotSupported:
        return False
    return True


def why(error: Exception) -> str:
    """Returns the reason in an error, short enough for a cell of a table."""
    reason = reason_of(error) if isinstance(error, AttnrxError) else f"{type(error).__name__}: {error}"
    reason = reason.partition(": export ")[0].replace("|", "/")  # without the remedy
    closed = f"{reason})" if reason.count("(") > reason.count(")") else reason
    return shorten(closed, 120, placeholder=" ...", break_on_hyphens=False)


def cell(run: Callable[[], str]) -> str:
    """Returns a result, or the reason why there is none."""
    try:
        return run()
    except Exception as error:  # the code of a library raises errors of any type
        return why(error)


def measured(given: SmallModel) -> dict[str, str]:
    """Measures a small model with random weights, and returns its results by column.

    Raises:
        Exception: attnrx or the model's library cannot load or run the model.
    """
    torch.manual_seed(0)
    model = rx.load(shaken(given.make()), inputs=given.inputs, image_size=given.side, factory=given.make).eval()
    images = random_images(model, family_of(model).input_shape(model), BATCH)
    diagnosis = rx.diagnose(model, rx.data.image_set(images))
    axes = [axis for axis, rule in RULES.items() if has_axis(model, diagnosis, rule)]
    found = {COPY: cell(lambda: copied(model, images)), **dict.fromkeys(axes, "yes")}
    try:
        small = pruned(model, diagnosis, " ".join(RULES[axis] for axis in axes))
    except Exception as error:
        return {**found, MACS: why(error)}
    return {
        **found,
        MACS: cell(lambda: both_counted(model, small, images)),
        RELOADED: cell(lambda: reloaded(small, images, given.make)),
        ONNX: exported(small, model),
    }


def measured_section() -> str:
    """Measures the small models of all installed libraries, and returns the section of the page with their table."""
    versions, missing, rows = [f"torch {version('torch')}"], [], []
    for library, (package, models) in SMALL_MODELS.items():
        try:
            importlib.import_module(library)
        except ImportError:
            missing.append(package)
            continue
        versions.append(f"{package} {version(package)}")
        for each in models():
            start = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = measured(each)
                except Exception as error:
                    found = {COPY: why(error)}
            rows.append(f"| {library} | {each.name} | {' | '.join(found.get(name, '') for name in COLUMNS)} |")
            print(rows[-1], f"{time.perf_counter() - start:.1f} s", flush=True)
    head = [f"| library | class | {' | '.join(COLUMNS)} |", f"|---|---|{':-:|' * len(AXES)}{'---|' * len(MEASURES)}"]
    end = f"{len(rows)} models: {', '.join(versions)}."
    if missing:
        end += f" Not measured, because they are not installed: {', '.join(missing)}."
    return "\n".join([MEASURED, *head, *rows, "", fill(end, 120, break_on_hyphens=False)]) + "\n"


def kind_of(name: str) -> str:
    """Returns the first letters of an architecture's name."""
    found = re.match(r"(eca_)?[a-z]+", name.lower())
    return name if found is None else found[0]


def of_timm() -> Iterator[Architecture]:
    """Yields every architecture with pretrained weights that has attention, with the number of its weight files."""
    timm: Any = importlib.import_module("timm")
    # Names are ARCHITECTURE.TAG, one for each weight file.
    tags = Counter(name.partition(".")[0] for name in timm.list_models(pretrained=True))
    for module in timm.list_modules():
        # The source is checked first, so that timm's many architectures without attention are not created.
        if "Attention" not in inspect.getsource(importlib.import_module(f"timm.models.{module}")):
            continue
        for name in sorted(set(timm.list_models(module=module)) & tags.keys()):
            make = partial(timm.create_model, name)
            model = make()
            if any("Att" in type(part).__name__ for part in model.modules()):
                yield Architecture(tags[name], LIBRARIES["timm"], kind_of(name), model, make)


def of_transformers() -> Iterator[Architecture]:
    """Yields transformers classes: those with a reader, the classes of TASKS with attention, and OTHER_CLASSES.

    Models are created with the default configuration of their class.
    """
    transformers: Any = importlib.import_module("transformers")
    readers = importlib.import_module("attnrx.vit.models.libraries.huggingface_family").READERS
    tasks = importlib.import_module("transformers.models.auto.modeling_auto")
    listed = [each for task in TASKS for each in getattr(tasks, f"MODEL_FOR_{task}_MAPPING_NAMES").values()]
    others = [name for each in listed for name in ((each,) if isinstance(each, str) else each)]
    for name in dict.fromkeys((*readers, *others, *OTHER_CLASSES)):
        kind = getattr(transformers, name, None)
        if kind is None:  # READERS also names parts of classes, which transformers does not export
            continue
        # MAE's masking removes patches at random, and a hybrid DPT has a convolutional backbone.
        config = kind.config_class(**({"mask_ratio": 0.0} if name == "ViTMAEModel" else {}))
        if name == "DPTForDepthEstimation":
            config.is_hybrid = False
        try:
            model = kind(config)
        except Exception as error:  # the class needs another library, or more than its configuration
            print(f"{name} is left out: {type(error).__name__}: {error}".splitlines()[0], flush=True)
            continue
        if any("Att" in type(part).__name__ for part in model.modules()):
            yield Architecture(1, LIBRARIES["hf"], name, model, partial(kind, config))


def of_torchvision() -> Iterator[Architecture]:
    """Yields the image classifiers with attention."""
    models: Any = importlib.import_module("torchvision.models")
    for name in models.list_models(module=models, include=["vit_*", "swin_*", "maxvit_*"]):
        make: Callable[[], Any] = partial(models.get_model, name)
        yield Architecture(1, LIBRARIES["torchvision"], kind_of(name), make(), make)


def of_open_clip() -> Iterator[Architecture]:
    """Yields the image towers. If a tower wraps a timm model, it is read like the timm model."""
    open_clip: Any = importlib.import_module("open_clip")
    for name in open_clip.list_models():
        tower = LIBRARIES["open_clip"].initialized(name)
        make = partial(LIBRARIES["open_clip"].initialized, name)
        if not hasattr(tower, "trunk"):
            yield Architecture(1, LIBRARIES["open_clip"], kind_of(name), tower, make)
            continue
        trunk: Any = tower.trunk
        inside = partial(lambda make: make().trunk, make)
        yield Architecture(1, LIBRARIES["timm"], kind_of(name), trunk, inside, " of timm (visual.trunk)")


SOURCES: dict[str, tuple[str, str, Callable[[], Iterator[Architecture]]]] = {
    "timm": ("timm", "weight files", of_timm),
    "transformers": ("transformers", "classes", of_transformers),
    "torchvision": ("torchvision", "architectures", of_torchvision),
    "open_clip": ("open_clip_torch", "configurations", of_open_clip),
}


def section(library: str, package: str, unit: str, outcomes: list[tuple[Architecture, Outcome]]) -> str:
    """Returns the section of one library, with its counts and a table of its classes."""
    total = sum(each.count for each, _ in outcomes)
    adopted = sum(each.count for each, outcome in outcomes if not outcome.reason)
    counts: dict[Outcome, int] = defaultdict(int)
    for each, outcome in outcomes:
        counts[outcome] += each.count
    lines = [
        f"## {library}",
        "",
        f"attnrx reads {adopted} of {total} {unit} with attention ({package} {version(package)}).",
        "",
        f"| class | {unit} | {' | '.join(AXES)} | refused because |",
        f"|---|--:|{':-:|' * len(AXES)}---|",
    ]
    # Supported classes come first. Within both groups, the order is by name.
    for outcome in sorted(counts, key=lambda each: (bool(each.reason), each.kind, -counts[each])):
        marks = ["yes" if axis in outcome.axes else "" for axis in AXES]
        lines.append(f"| {outcome.kind} | {counts[outcome]} | {' | '.join(marks)} | {outcome.reason} |")
    return "\n".join(lines) + "\n"


def sections_of(page: Path) -> list[str]:
    """Returns the sections of the page that this script writes, without the introduction."""
    titles = "|".join((TITLE, *(f"## {library}" for library in SOURCES)))
    return re.split(rf"\n(?=(?:{titles})\n)", page.read_text())[1:] if page.exists() else []


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", default=PAGE)
    parser.add_argument("outcomes", type=Path, nargs="?")
    parser.add_argument("--measure", action="store_true", help="measure small models, and keep the other tables")
    arguments = parser.parse_args(words)
    before, parts = sections_of(arguments.page), [INTRODUCTION]
    if arguments.measure:
        parts += [measured_section(), *(each for each in before if not each.startswith(TITLE))]
        arguments.page.write_text("\n".join(parts))
        return
    state = State(arguments.outcomes)
    parts += [each for each in before if each.startswith(TITLE)]
    for library, (package, unit, read) in SOURCES.items():
        try:
            importlib.import_module(library)
        except ModuleNotFoundError:
            print(f"{library} is not installed: its section is left out")
            continue
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            parts.append(section(library, package, unit, outcomes_of(read(), state)))
    arguments.page.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
