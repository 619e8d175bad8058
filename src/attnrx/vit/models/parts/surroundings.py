"""Describes the parts around a Vision Transformer in a user's module, such as decoders and custom heads."""

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
    """A pair of layers around the Vision Transformer, between which pruning left only `units` hidden units.

    `first` and `second` are the paths of the two layers. `between` lists the paths of the modules between them that
    have weights per hidden unit, as in `Pair`.
    """

    first: str
    second: str
    between: tuple[str, ...]
    units: int

    def shape_(self, module: nn.Module) -> None:
        """Prunes the layers of a newly created module to the shapes of the saved module.

        Raises:
            InvalidInput: The module lacks one of the parts.
        """
        require_parts(module, (self.first, self.second, *self.between), "the module")
        units = sides_of(module.get_submodule(self.first))[1]
        self.keep_(module, torch.arange(units, device="cpu") < self.units)

    def keep_(self, module: nn.Module, keep: Bool[Tensor, "units"]) -> None:
        """Removes the hidden units outside `keep` from the layers and from the modules between them, in place."""
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
    """Describes, in JSON values, the parts around the Vision Transformer in a user's module.

    Four attributes describe how the module is recreated. `name` is the user's class, as "module:class". `factory` is
    the function that creates the module, as "module:function", or None if the class or its library creates it. If a
    library creates the module, `creation` contains `library`, `architecture` and `arguments` (`AdoptedFamily.create`).
    `by_class` is true if calling the class without arguments creates the module.

    Other attributes describe the module's calls and outputs. `path` is the path of the Vision Transformer, or "" for
    the module itself. `call` is the method that takes only images: "forward", or one of IMAGE_METHODS if forward also
    needs other inputs. `read_blocks` are the indices of blocks whose patch tokens are used by modules besides the next
    block. `sizes` holds the number of values per image in each returned tensor. `outputs` is the name of the
    `OutputKind`. `macs` are the multiply-accumulates per image outside the Vision Transformer. `cuts` are the pruned
    pairs of layers around the Vision Transformer (`Cut`).

    The last attributes describe one input of the module. `calls` is the number of images that the Vision Transformer
    receives for this input. `lengths` lists, for every block, the lengths of its token sequences, or is () if the
    tokens of an image are one sequence. `head_calls` is how often the classifier runs, or None if it runs once per
    image.
    `image_size` is the (height, width) of the module's input if the module resizes or pads its images, or () if it does
    not. `inputs` contains the fields of `ModuleInputs` if the module does not take images.
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
        """What a user must do before `load` can recreate a saved module, or "" if nothing is needed."""
        if self.factory is None and self.creation is not None:
            return ""
        if self.by_class:
            return f"import {self.name.partition(':')[0]} first"
        given = "..." if self.factory is None else repr(self.factory)
        return f"attnrx.load(folder, factory={given}) with a function that creates the module with any weights"


class OfImages(nn.Module):
    """Wraps a user's module so that it takes only images, even if the module's `forward` also needs other inputs."""

    def __init__(self, module: nn.Module, call: str):
        super().__init__()
        self.module, self.call = module, call

    @property
    def attnrx_inputs(self) -> ModuleInputs | None:
        """The inputs of a module that does not take images, or None for a module that takes images."""
        return inputs_of(self.module) if self.call == "forward" else None

    def forward(self, images: Tensor) -> Any:
        """Returns the module's output for images [batch, channels, height, width]."""
        return answered(self.call, self.module, images)


def answered(call: str, module: nn.Module, images: Tensor) -> Any:
    """Calls the method `call` of a user's module with images, [batch, channels, height, width].

    For a transformers detector, only the detections are returned, not the decoder's states.
    """
    if call == "forward":
        answer = called(module, images)
        is_of_library = isinstance(answer, Mapping) and type(answer).__module__.startswith("transformers.")
        is_detector = is_of_library and answer.keys() >= {"logits", "pred_boxes"}
        return {name: answer[name] for name in DETECTIONS if name in answer} if is_detector else answer
    features = getattr(module, call)(images)
    return getattr(features, "pooler_output", features)
