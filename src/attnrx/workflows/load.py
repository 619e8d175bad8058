"""`load`: a model from a folder, a name, a module of another library, or an exported file; and the checks before it."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrx.data import Columns
from attnrx.data.loading import SIDES, locate
from attnrx.data.model_data import ModelBatches
from attnrx.exporting import Format, is_exported, load_exported
from attnrx.nouns.elastic import Elastic, Size, is_elastic
from attnrx.nouns.target import COSTS, Target, target_of
from attnrx.support.arguments import (
    FASTER,
    MODEL,
    PATH,
    SIDE,
    checked,
    described,
    either,
    instance,
    number,
    one_of,
    optional,
    or_percent,
)
from attnrx.support.atomic_writes import real_path
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.optional import require_installed
from attnrx.support.progress import begin
from attnrx.vit.models import Reader, accepting, family_of, load_model, model_fingerprint, state_outputs_
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import STATEMENTS

# A model or its name; exactly one of the budgets, whose ranges depend on each other, is validated by `target_of`.
BUDGET = optional(or_percent(number(0.0, expected="a positive number")))
SOURCE = replace(
    either("a folder, a name such as timm:vit_tiny_patch16_224, or a model", PATH, MODEL),
    explain=lambda value: _no_model(value),
)

INPUTS = instance("a tensor, a tuple of arguments or a mapping of named ones", Tensor, tuple, list, Mapping)


@checked(
    source=SOURCE,
    macs=BUDGET,
    params=BUDGET,
    faster=optional(FASTER),
    outputs=optional(one_of(*STATEMENTS)),
    inputs=optional(INPUTS),
    image_size=optional(either("the side of the images in pixels, or (height, width)", SIDE, SIDES)),
)
@verb
def load(  # noqa: PLR0913  (a keyword for every kind of budget)
    source: str | Path | nn.Module,
    seed: int = 0,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    trust: bool = False,
    *,
    macs: float | str | None = None,
    params: float | str | None = None,
    faster: float | None = None,
    reader: Reader | None = None,
    factory: Callable[..., nn.Module] | str | None = None,
    outputs: str | None = None,
    inputs: Any = None,
    image_size: int | tuple[int, int] | None = None,
) -> nn.Module:
    """Loads or builds a model.

    `source` is one of:

    - a folder saved by attnrx, or `hub:OWNER/NAME` for such a folder on the Hugging Face hub;
    - `timm:NAME`, with the weights of the file `weights` or the weights that timm downloads;
    - `hf:ID` or a transformers folder;
    - `torchvision:NAME`, with weights as `timm:NAME`, or `open_clip:NAME` (an image tower, fresh weights);
    - a name that an installed package registers, one of `rx.models.model_names()` (fresh weights, or where they are
      published the file `weights`);
    - your module: a model of another library, or a module that contains one (a backbone with a decoder, several
      outputs), or whose parts a `reader` names;
    - the folder of an elastic model, with one of `macs`, `params` or `faster`; in one text, `FOLDER@macs=0.6`: the size
      of the least divergence within this budget;
    - a file written by `export`: the returned module runs it with its runtime.

    Args:
        source: The model.
        seed: Seeds fresh weights.
        weights: Weights in a local file (safetensors, or PyTorch's for a published model); of a folder those after
            further training, as a file or a folder that the Trainer of transformers wrote.
        pretrained: Whether timm and torchvision load their published weights.
        trust: Run code of the model's author: of a .pt2 file (formats program and aotinductor), or of a repository
            of transformers whose config.json or preprocessor_config.json names code (auto_map).
        macs: The share of the original's MACs, for an elastic model.
        params: The share of its parameters.
        faster: The speed-up over it.
        reader: The paths of the parts of a module of your own.
        factory: Creates a module of your own again, with any weights: a function, or "module:function". With a reader
            it is called as `factory(**reader.arguments)`, else without arguments; by default it is the class. A saved
            folder of such a model needs it where the class has not been imported or needs arguments.
        outputs: What the outputs are, where the model does not state it: "classes" (logits of classes, or of two
            classes by one logit), "multilabel" (one logit per label, each with a sigmoid), "regression" (numbers) or
            "embedding". All comparisons depend on it; copies of the model and saved folders keep it. The configuration
            of a transformers model states it by `problem_type`; without any statement, outputs of a classifier are
            classes.
        inputs: An example of what the forward of a module of your own takes, where that is no batch of images: a
            tensor, a tuple of arguments or a mapping of named ones, with two or more items, e.g. of the first batch of
            your data. The module is then planned and verified on such inputs (`shrink(..., inputs=...)`).
        image_size: The side of the images that the model is to take, or their (height, width): position embeddings are
            interpolated as the library does it (timm, transformers, torchvision), and costs, plans and files are for
            this size. By default the model's.

    Returns:
        The model.

    Raises:
        InvalidInput: The source is no model, or a budget was given for a model of one size.
        UnknownName: No model of the library has this name.
        CheckpointError: There is nothing to load, or it is damaged.
        NotSupported: A library is missing, or the model has parts that attnrx does not read.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)  # a copy with the same outputs
        >>> bool((model(torch.ones(1, 3, 32, 32)) - vit(torch.ones(1, 3, 32, 32))).abs().max() < 1e-4)
        True
    """
    # A budget selects a size of an elastic model; for any other source it is an error, not a request to compress.
    has_budget = any(budget is not None for budget in (macs, params, faster))
    if inputs is not None and not isinstance(source, nn.Module):
        raise InvalidInput(f"load({described(source)}) takes no inputs: they are those of a module that is given.")
    # Files of a runtime first: they are no folders, and have no configuration.
    if isinstance(source, str | Path) and is_exported(source):
        model = load_exported(source, trust)
    elif (found := size_of(source, target_of(faster, macs, params) if has_budget else None)) is not None:
        elastic, size = found
        model = load_model(elastic.folder / size.name, factory=factory)
        elastic.require(size, model_fingerprint(model), family_of(model).costs(model).macs)
    else:
        model = load_model(
            source, seed, weights, pretrained, trust=trust, reader=reader, factory=factory, inputs=inputs
        )
    if image_size is not None:
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        model = accepting(model, (family_of(model).input_shape(model)[0], height, width))
    if outputs is not None:
        state_outputs_(model, STATEMENTS[outputs])
    return model


def _no_model(value: object) -> str:
    """Returns the end of a message about a value that is no model, though it belongs to one."""
    if isinstance(value, Mapping):
        return (
            ". A state dict has weights, but no architecture: load them into their model, model.load_state_dict(...), "
            "and give that; or give the name and the file, e.g. attnrx.load('timm:vit_tiny_patch16_224', "
            "weights='FILE')."
        )
    return ". This is a class: give an instance of it." if isinstance(value, type) else ""


def size_of(source: str | Path | nn.Module, target: Target | None = None) -> tuple[Elastic, Size] | None:
    """Returns the elastic model that a source names, and its size for the budget; None for a source of another kind.

    Raises:
        InvalidInput: An elastic model without a budget, or a budget for another source.
        NotSupported: No size is small enough.
    """
    if isinstance(source, str | Path):
        # Only if the part before the last @ is an elastic model: a folder may have an @ in its name.
        folder, _, text = str(source).rpartition("@")
        if folder and target is None and is_elastic(folder):
            source, target = folder, Target.parse(text)
        if is_elastic(source):
            elastic = Elastic.read(source)
            if target is None or target.quantity not in COSTS:
                raise InvalidInput(f"{elastic}\nGive macs=0.6, params=0.7 or faster=1.4, or the folder of one size.")
            return elastic, elastic.best(target.quantity, target.limit)
    if target is not None:
        raise InvalidInput(f"load({described(source)}) with the budget {target}: it is not an elastic model.")
    return None


def load_original(model: nn.Module | str | Path, weights: str | Path | None, data: Any) -> nn.Module:
    """Loads the model, with the inputs of the first batch of the data where those are no images."""
    begin("loading the model")
    batches = next(iter(data.values())) if isinstance(data, Mapping) and data else data
    inputs = batches.example() if isinstance(batches, ModelBatches) else None
    return load(model, weights=weights, inputs=inputs).eval()


def preflight(
    *,
    data: Any = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    formats: Iterable[Format] = (),
    report: bool = False,
) -> None:
    """Checks what a long call will need, in the first second.

    `data` is checked where it is a name or a path, `formats` are the formats of files to write; with `report` the call
    writes the HTML report.

    Raises:
        NotSupported: A library is missing; the message names the extra that installs it.
        DataError: There is no such dataset, or it lacks a column that was named.
        CheckpointError: The output folder cannot be written.
    """
    if report:
        require_installed("report", "the report", "jinja2")
    for form in formats:
        require_installed(form.extra, f"the format {form.name}", *form.libraries)
    if folder is not None:
        folder = real_path(folder)
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise CheckpointError(f"{folder} cannot be written: {existing} is not a folder; choose another one.")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise CheckpointError(f"{folder} cannot be written: no permission for {existing}; choose another one.")
    if isinstance(data, str | Path):
        locate(data, columns or Columns())
