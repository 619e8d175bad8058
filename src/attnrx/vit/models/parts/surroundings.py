"""Describes the parts around a Vision Transformer in a user's module: decoders, several outputs, heads of any class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.models.parts.mlp import CONVOLUTIONS, keep_units_of_, sides_of
from attnrx.vit.models.parts.module_inputs import ModuleInputs, called, inputs_of
from attnrx.vit.models.parts.vit_parts import require_parts

IMAGE_METHODS = ("get_image_features", "encode_image")  # methods of image-text models that take only images
DETECTIONS = ("logits", "pred_boxes", "pred_masks")
# For each reading of the outputs: the assumption, its reason, and the `load(model, outputs=...)` for the other reading.
DOUBTS = {
    "logits": "the outputs are taken as logits of classes, because a linear map makes them; if they are an embedding, "
    'load the model with outputs="embedding".',
    "binary_logit": "the one output is taken as the logit of class 1 against class 0; if it is the value of a "
    'regression, load the model with outputs="regression".',
    "embedding": "the outputs are taken as an embedding; if they are logits of classes, load the model with "
    'outputs="classes".',
    "regression": "the one output is taken as a number; if it is the logit of class 1 against class 0, load the model "
    'with outputs="classes".',
    "label_probabilities": "the outputs are taken as one probability per label, because a sigmoid makes them; if they "
    'are numbers, load the model with outputs="regression".',
}


class Cut(NamedTuple):
    """Two maps, named by their paths, between which only `units` units remain.

    `between` lists the parts between the maps that have weights per unit, as in `Pair`.
    """

    first: str
    second: str
    between: tuple[str, ...]
    units: int

    def shape_(self, module: nn.Module) -> None:
        """Removes units from a newly created module, so that it has the shapes of the smaller module.

        Raises:
            InvalidInput: The module lacks one of the parts.
        """
        require_parts(module, (self.first, self.second, *self.between), "the module")
        units = sides_of(module.get_submodule(self.first))[1]
        self.keep_(module, torch.arange(units, device="cpu") < self.units)

    def keep_(self, module: nn.Module, keep: Bool[Tensor, "units"]) -> None:
        """Removes the units outside `keep` from the maps and the parts between them, in place."""
        for path, side in ((self.first, "out"), (self.second, "in")):
            part: Any = module.get_submodule(path)
            index = keep.nonzero()[:, 0].to(part.weight.device)
            dim = int((side == "in") != isinstance(part, nn.ConvTranspose2d))
            part.weight = nn.Parameter(part.weight.detach().index_select(dim, index), part.weight.requires_grad)
            if side == "out" and part.bias is not None:
                part.bias = nn.Parameter(part.bias.detach()[index], part.bias.requires_grad)
            setattr(part, f"{side}_{'channels' if isinstance(part, CONVOLUTIONS) else 'features'}", len(index))
        for path in self.between:
            keep_units_of_(module.get_submodule(path), keep)


@dataclass(frozen=True)
class Surroundings:
    """The parts around the Vision Transformer in a user's module, as JSON values.

    Four attributes describe how the module is created again. `name` is the user's class, "module:class". `factory` is
    the function that creates the module, "module:function", or None if the class or its library does. If a library
    creates the module, `creation` contains `library`, `architecture` and `arguments` (`AdoptedFamily.create`).
    `by_class` is true if calling the class without arguments creates the module.

    Other attributes describe the module's calls and outputs. `path` is the path of the Vision Transformer, or "" for
    the module itself. `call` is the method that takes only images: "forward", or one of IMAGE_METHODS if forward needs
    other inputs, too. `read_blocks` are the indices of blocks whose patch tokens are read by other parts than the next
    block. `sizes` holds the number of values per image in each returned tensor. `outputs` is the name of the
    `OutputKind`. `macs` are the multiply-accumulates per image outside the Vision Transformer. `cuts` are the pairs of
    maps around the Vision Transformer that lost units (`Cut`).

    The last attributes describe one input. `calls` is the number of images that the Vision Transformer gets for it.
    `lengths` lists the lengths of the token sequences for every block, or is () for one sequence of all tokens per
    image. `head_calls` is how often the classifier runs (None: once per image). If the module resizes or pads its
    images, `image_size` is the (height, width) of its input, and otherwise (). If the module takes other inputs than
    images, `inputs` contains the fields of `ModuleInputs`.
    """

    name: str
    factory: str | None
    path: str
    read_blocks: tuple[int, ...]
    sizes: Mapping[str, int]
    outputs: str
    macs: int
    creation: Mapping[str, Any] | None = None
    by_class: bool = False
    call: str = "forward"
    cuts: tuple[Cut, ...] = ()
    calls: int = 1
    lengths: tuple[tuple[int, ...], ...] = ()
    head_calls: int | None = None
    image_size: tuple[int, ...] = ()
    inputs: tuple[tuple[Any, ...], ...] = ()

    @property
    def needed(self) -> str:
        """What a user must do before `load` can create a saved module again, or "" if nothing is needed."""
        if self.factory is None and self.creation is not None:
            return ""
        if self.by_class:
            return f"import {self.name.partition(':')[0]} first"
        given = "..." if self.factory is None else repr(self.factory)
        return f"attnrx.load(folder, factory={given}) with a function that creates the module with any weights"


class OfImages(nn.Module):
    """Wraps a user's module so that it can be called with only images, even if its forward needs other inputs, too."""

    def __init__(self, module: nn.Module, call: str):
        super().__init__()
        self.module, self.call = module, call

    @property
    def attnrx_inputs(self) -> ModuleInputs | None:
        """The inputs of the module if it takes other inputs than images, or None."""
        return inputs_of(self.module) if self.call == "forward" else None

    def forward(self, images: Tensor) -> Any:
        """Returns the module's output for images [batch, channels, height, width]."""
        return answered(self.call, self.module, images)


def answered(call: str, module: nn.Module, images: Tensor) -> Any:
    """Calls a user's module by its method `call` with only images [batch, channels, height, width].

    The output of a transformers detector is reduced to its detections, without the states of its decoder.
    """
    if call == "forward":
        answer = called(module, images)
        is_of_library = isinstance(answer, Mapping) and type(answer).__module__.startswith("transformers.")
        is_detector = is_of_library and answer.keys() >= {"logits", "pred_boxes"}
        return {name: answer[name] for name in DETECTIONS if name in answer} if is_detector else answer
    features = getattr(module, call)(images)
    return getattr(features, "pooler_output", features)
