"""`load` returns a model for a folder, a name, a module or an exported file. `preflight` checks what a call needs."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attnrx.data import Columns
from attnrx.data.loading import SIDES, locate
from attnrx.data.model_data import ModelBatches, stated_image_size
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
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.optional import require_installed
from attnrx.support.progress import begin
from attnrx.vit.models import Reader, accepting, family_of, load_model, model_fingerprint, state_outputs_
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import STATEMENTS

# `target_of` checks that exactly one budget was passed, and that its value is in the range for this kind of budget.
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

    Pass one of these as `source`:

    - A folder that attnrx saved, or `hub:OWNER/NAME` for a saved folder on the Hugging Face hub.
    - `timm:NAME`. The weights come from the file `weights`, or timm downloads them.
    - `hf:ID` or a transformers folder.
    - `torchvision:NAME`, with weights as for `timm:NAME`, or `open_clip:NAME` (an image tower with fresh weights).
    - A name that an installed package registers (see `rx.models.model_names()`). The weights are fresh, or published
      weights from the file `weights`.
    - Your own module. It may be another library's model, a module that contains such a model (e.g. a backbone with a
      decoder or with several outputs), or a module whose parts a `reader` names.
    - The folder of an elastic model, with a budget: one of `macs`, `params` or `faster`, or a text like
      `FOLDER@macs=0.6`. `load` returns the size with the least divergence within the budget.
    - A file that `export` wrote. The returned module runs the file in its runtime.

    Args:
        source: The model to load, in one of these forms.
        seed: The seed for initializing fresh weights.
        weights: A local file of weights (safetensors, or PyTorch's format for a published model). If you trained the
            model of a saved folder further, pass the new weights, as a file or as a folder that transformers' Trainer
            wrote.
        pretrained: Whether timm and torchvision load their published weights.
        trust: Whether to run code by the model's author. A .pt2 file (formats program and aotinductor) can contain such
            code. A transformers repository can name it in config.json or preprocessor_config.json (auto_map).
        macs: The budget for an elastic model, as a share of the original's MACs.
        params: The budget for an elastic model, as a share of the original's parameters.
        faster: The budget for an elastic model, as a speed-up over the original.
        reader: A `Reader` that names the parts of your own module by their attribute paths.
        factory: A function that creates your own module again, with any weights, or the function's name
            "module:function". It is called as `factory(**reader.arguments)` if there is a reader, otherwise without
            arguments. By default, the class of the module is called. To load a saved folder of your own module, pass
            `factory` if the class has not been imported or needs arguments.
        outputs: The kind of the outputs, if the model does not define it: "classes" (a logit per class, or one logit
            for two classes), "multilabel" (one logit per label, each with a sigmoid), "regression" (numbers) or
            "embedding". All comparisons depend on this kind. Copies of the model and saved folders keep it. A
            transformers model defines it in its configuration, as `problem_type`. By default, the outputs of a
            classifier are "classes".
        inputs: Example arguments of your own module, if it does not take a batch of images: a tensor, a tuple of
            arguments or a mapping of named arguments. They must contain a batch of two or more items, e.g. the first
            batch of your data. attnrx then plans and verifies the module on such inputs (`shrink(..., inputs=...)`).
        image_size: The side of the images that the model will take, or their (height, width). By default, the model's
            own size. For another size, position embeddings are interpolated by the library's own method (timm,
            transformers, torchvision). Costs, plans and files are then for this size.

    Returns:
        The loaded model.

    Raises:
        InvalidInput: The source is not a model, or you passed a budget for a model that is not elastic.
        UnknownName: The library has no model of this name.
        CheckpointError: The source does not exist, or is damaged.
        NotSupported: A library is missing, or the model has parts that attnrx does not support.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)  # a copy with the same outputs
        >>> bool((model(torch.ones(1, 3, 32, 32)) - vit(torch.ones(1, 3, 32, 32))).abs().max() < 1e-4)
        True
    """
    # A budget selects a size of an elastic model. With any other source, a budget raises an error.
    sides = (image_size, image_size) if isinstance(image_size, int) else image_size
    has_budget = any(budget is not None for budget in (macs, params, faster))
    if inputs is not None and not isinstance(source, nn.Module):
        raise InvalidInput(f"load({described(source)}) takes no inputs: they are those of a module that is given.")
    # Exported files are handled first, because they are not folders and have no configuration.
    if isinstance(source, str | Path) and is_exported(source):
        model = load_exported(source, trust)
    elif (found := size_of(source, target_of(faster, macs, params) if has_budget else None)) is not None:
        elastic, size = found
        model = load_model(elastic.folder / size.name, factory=factory)
        elastic.require(size, model_fingerprint(model), family_of(model).costs(model).macs)
    else:
        own = {"reader": reader, "factory": factory, "inputs": inputs, "image_size": sides}
        model = load_model(source, seed, weights, pretrained, trust=trust, **own)
    if sides is not None:
        model = accepting(model, (family_of(model).input_shape(model)[0], *sides))
    if outputs is not None:
        state_outputs_(model, STATEMENTS[outputs])
    return model


def _no_model(value: object) -> str:
    """Returns the end of an error message about a state dict or a class that was passed instead of a model."""
    if isinstance(value, Mapping):
        return (
            ". A state dict has weights, but no architecture: load them into their model, model.load_state_dict(...), "
            "and give that; or give the name and the file, e.g. attnrx.load('timm:vit_tiny_patch16_224', "
            "weights='FILE')."
        )
    return ". This is a class: give an instance of it." if isinstance(value, type) else ""


def size_of(source: str | Path | nn.Module, target: Target | None = None) -> tuple[Elastic, Size] | None:
    """Returns an elastic model and the size that fits the budget, or None if the source is not an elastic model.

    Raises:
        InvalidInput: You passed an elastic model without a budget, or a budget with any other source.
        NotSupported: No size is small enough.
    """
    if isinstance(source, str | Path):
        # A folder may have an @ in its name. So the text is only split if the part before it is an elastic model.
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
    """Loads the original model. If it does not take images, the data's first batch serves as example inputs.

    A module may refuse the image size for which its Vision Transformer was created. The module is then loaded at the
    image size of the data.
    """
    begin("loading the model")
    batches = next(iter(data.values())) if isinstance(data, Mapping) and data else data
    inputs = batches.example() if isinstance(batches, ModelBatches) else None
    try:
        return load(model, weights=weights, inputs=inputs).eval()
    except NotSupported:
        size = stated_image_size(data) if isinstance(model, nn.Module) and inputs is None else None
        if size is None:
            raise
        return load(model, weights=weights, image_size=size).eval()


def preflight(
    *,
    data: Any = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    formats: Iterable[Format] = (),
    report: bool = False,
) -> None:
    """Checks, at the start of a long call, that everything that the call will need is available.

    `data` is checked if it is a name or a path. `formats` are the formats of the files that the call will write. Set
    `report` if the call will write the HTML report.

    Raises:
        NotSupported: A library is missing. The message names the extra that installs it.
        DataError: The dataset does not exist, or lacks one of the named columns.
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
