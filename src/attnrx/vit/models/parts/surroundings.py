"""What is around the Vision Transformer in a module of a user: a decoder, several outputs, a head of any class."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from attnrx.support.shapes import Bool, Tensor
from attnrx.vit.models.parts.mlp import CONVOLUTIONS, keep_units_of_, sides_of
from attnrx.vit.models.parts.module_inputs import ModuleInputs, called, inputs_of
from attnrx.vit.models.parts.vit_parts import require_parts

IMAGE_METHODS = ("get_image_features", "encode_image")  # of models of images and texts
DETECTIONS = ("logits", "pred_boxes", "pred_masks")
# What was taken, why, and what else it may be, with the statement for that (`load(model, outputs=...)`).
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
    """Two maps, by their paths, of which so many `units` between them are left; `between` are parts with weights per
    unit, as in `Pair`.
    """

    first: str
    second: str
    between: tuple[str, ...]
    units: int

    def shape_(self, module: nn.Module) -> None:
        """Gives a module that was created anew the shapes of the smaller one.

        Raises:
            InvalidInput: It has no such parts.
        """
        require_parts(module, (self.first, self.second, *self.between), "the module")
        units = sides_of(module.get_submodule(self.first))[1]
        self.keep_(module, torch.arange(units, device="cpu") < self.units)

    def keep_(self, module: nn.Module, keep: Bool[Tensor, "units"]) -> None:
        """Removes the units that are not kept, in place."""
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
    """What is around the Vision Transformer of a module of a user, as JSON values.

    `name` is "module:class" of the user's class, `factory` "module:function" of the function that creates it (None:
    the class, or its library), `path` where the Vision Transformer is, "" if it is the module itself. `read_blocks` are
    the indices of the blocks whose patch tokens other parts than the next block read. `sizes` are the numbers per image
    of every tensor that is returned, by their places, `outputs` the name of the `OutputKind`, and `macs` the
    multiply-accumulates per image outside of the Vision Transformer. `creation` is how a library creates the module, if
    it does: its `library`, and `architecture` and `arguments` (`AdoptedFamily.create`). `by_class` is whether the class
    without arguments creates it. `call` is what images alone are given to: "forward", or one of IMAGE_METHODS where
    that needs other inputs too. `cuts` are the pairs of maps around the Vision Transformer of which units were removed,
    with the units that are left (`Cut`). `calls` is the number of images that the Vision Transformer gets for one
    input. `lengths` are the numbers of tokens of every sequence that a block gets for it, () for one sequence of all
    tokens per image. `head_calls` is how often its classifier runs for it, None for once per image. `image_size` is
    (height, width) of the images of a module that resizes or pads them, () if the Vision Transformer gets them as they
    are. `inputs` are the fields of `ModuleInputs` where the module takes other inputs than images.
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
        """What `load` needs to create a saved module again, "" for nothing."""
        if self.factory is None and self.creation is not None:
            return ""
        if self.by_class:
            return f"import {self.name.partition(':')[0]} first"
        given = "..." if self.factory is None else repr(self.factory)
        return f"attnrx.load(folder, factory={given}) with a function that creates the module with any weights"


class OfImages(nn.Module):
    """A module of a user, called with images alone where its forward needs other inputs too."""

    def __init__(self, module: nn.Module, call: str):
        super().__init__()
        self.module, self.call = module, call

    @property
    def attnrx_inputs(self) -> ModuleInputs | None:
        """What the module takes other than images."""
        return inputs_of(self.module) if self.call == "forward" else None

    def forward(self, images: Tensor) -> Any:
        """Returns what the module returns for images [batch, channels, height, width]."""
        return answered(self.call, self.module, images)


def answered(call: str, module: nn.Module, images: Tensor) -> Any:
    """Returns what a user's module returns if this method gets only images [batch, channels, height, width].

    Of a detector of transformers these are its detections, and not the states of its decoder.
    """
    if call == "forward":
        answer = called(module, images)
        is_of_library = isinstance(answer, Mapping) and type(answer).__module__.startswith("transformers.")
        is_detector = is_of_library and answer.keys() >= {"logits", "pred_boxes"}
        return {name: answer[name] for name in DETECTIONS if name in answer} if is_detector else answer
    features = getattr(module, call)(images)
    return getattr(features, "pooler_output", features)
