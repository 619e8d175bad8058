"""The interface of a model family: where the attention layers are, and how a model is described and rebuilt."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.preprocessing import ImageGeometry
from attnrx.support.shapes import Bool, Float, ImageBatch, Tensor
from attnrx.vit.attention import Attention
from attnrx.vit.costs import ModelCosts, TokenCosts, token_costs
from attnrx.vit.models.parts.mlp import hidden_units, rank_of
from attnrx.vit.models.parts.record import RECORD, Record, record_of
from attnrx.vit.models.parts.token_reduction import reduction_of, require_all_tokens
from attnrx.vit.models.parts.vit_parts import model_name
from attnrx.vit.spec import AttentionSpec
from attnrx.vit.tokens import Shape, TokenLayout, TokenPolicy

MLPRanks = tuple[tuple[int | None, int | None], ...]
"""The ranks of both linear maps in every layer's MLP. None stands for a map that is one matrix, without factors."""

STATED_OUTPUTS = "stated_outputs"
"""The name of a model attribute. The attribute holds the name of the `OutputKind` that the user passed. Copies of the
model keep the attribute. A model with a record stores the kind in its record instead."""


def stated_outputs(model: nn.Module) -> str | None:
    """Returns the name of the `OutputKind` that a model's user passed, or None if the user passed none."""
    record = record_of(model)
    return vars(model).get(STATED_OUTPUTS) if record is None else record.outputs


def state_outputs_(model: nn.Module, kind: str) -> None:
    """Stores the name of an `OutputKind` in a model."""
    record = record_of(model)
    if record is None:
        setattr(model, STATED_OUTPUTS, kind)
    else:
        vars(model)[RECORD] = replace(record, outputs=kind)


class Family(ABC):
    """A kind of model. A family stores no state, and only its methods with a trailing underscore change a model.

    Raises:
        InvalidInput: You passed a model of another family to one of the methods.
    """

    name: str
    model_type: type[Any]
    """The class of the family's models."""

    def matches(self, model: nn.Module) -> bool:
        """Returns whether the model belongs to this family, by its class or by its record."""
        return isinstance(model, self.model_type) or self.reads(record_of(model))

    def reads(self, record: Record | None) -> bool:
        """Returns whether a record belongs to a model of this family."""
        return record is not None and record.family == self.name

    def viewed(self, model: nn.Module, record: Record) -> Any:
        """Returns a model with a record in the form that this family's methods accept. Do not change the result."""
        raise NotImplementedError

    def _own(self, model: nn.Module) -> Any:
        if isinstance(model, self.model_type):
            return model
        record = record_of(model)
        if record is None or not self.reads(record):
            raise InvalidInput(
                f"{model_name(model)} was not adopted by the family {self.name!r}; call attnrx.load(model) first."
            )
        return self.viewed(model, record)

    @abstractmethod
    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """Returns the attention of every layer, in order."""

    def specs(self, model: nn.Module) -> tuple[AttentionSpec, ...]:
        """Returns the shape of every layer's attention."""
        return tuple(layer.spec for layer in self.attention(model))

    @abstractmethod
    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Replaces one layer's attention in place, and updates the model's own description."""

    def installed_(self, model: nn.Module, layer: int) -> Attention:
        """Returns the attention module with which the model computes a layer, not a converted copy."""
        return self.attention(model)[layer]

    def restored_blocks(self, model: nn.Module) -> Container[int] | None:
        """Returns the blocks after which a forward pass needs all patches even if tokens are pruned or merged.

        Models built from attnrx's own layers return None.
        """
        return None

    @abstractmethod
    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Returns the two linear maps of every layer's MLP, whole or factored, or () if MLPs are of another kind."""

    def reads_attention(self, model: nn.Module) -> bool:
        """Returns whether the family can read the model's attention. If not, each layer consists of only an MLP."""
        return True

    @abstractmethod
    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the path of every layer's block. If attention is not read, the part around the MLP is the block."""

    def keep_units_(self, model: nn.Module, layer: int, keep: Bool[Tensor, "units"]) -> None:  # noqa: B027
        """Removes all units outside `keep` from the parts between the two maps of an MLP that have weights per unit."""

    def has_plain_units(self, model: nn.Module) -> bool:
        """Returns whether the units of every MLP are separate: only an activation lies between its two maps."""
        return bool(self.mlp(model))

    @abstractmethod
    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces the first (`which` 0) or second (1) map of a layer's MLP, and updates the model's description."""

    @abstractmethod
    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns a JSON-ready description from which `build` creates the same model, without its weights."""

    @abstractmethod
    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the model from its description. Loading calls it on the meta device."""

    def library_model(self, model: nn.Module) -> nn.Module:
        """Returns a new model from its own library, with fresh weights. Speed ratios use it as the baseline."""
        return self.build(self.describe(model))

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns the channels, height and width of an image."""
        return self._own(model).origin.input_shape

    @abstractmethod
    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        """Resizes the model, in place, for images of another height and width, as its library does.

        Raises:
            NotSupported: The library does not resize the position embeddings of this model.
            InvalidInput: Patches do not tile such images.
        """

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the mean and standard deviation of the image normalization, one value per channel."""
        origin = self._own(model).origin
        return origin.mean, origin.std

    def geometry(self, model: nn.Module) -> ImageGeometry | None:
        """Returns how the library turns a picture into pixels for evaluation, or None if the library says nothing."""
        return None

    def inputs(self, model: nn.Module) -> Any:
        """Returns the inputs of the model (`ModuleInputs`), or None if the model takes images."""
        return None

    def accepts_(self, model: nn.Module, shape: tuple[int, ...]) -> bool:
        """Changes a model to take another number of input channels. Returns False if the model cannot be changed."""
        return False

    def knows_normalization(self, model: nn.Module) -> bool:
        """Returns whether `normalization` comes from the model itself. If not, it is a common default."""
        return True

    def processor_config(self, model: nn.Module) -> dict[str, Any]:
        """Returns the content of transformers' preprocessor_config.json for a saved model, or {} if there is none."""
        return {}

    @abstractmethod
    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        """Returns the final features of all patches of the images. Pruned or merged patches are restored first."""

    def saved_names(self, model: nn.Module) -> Mapping[str, str]:
        """Maps weight names in the library's files to the model's weight names. {} means that both are equal."""
        return {}

    def caller(self, model: nn.Module) -> Callable[[nn.Module, ImageBatch], Any]:
        """Returns a function that takes the model (or a copy) and images, and returns the model's answer.

        The answer has one row per image. If the model is part of a user's module, the answer is the module's output.
        """
        return called_with_images

    def output_kind(self, model: nn.Module) -> str:
        """Returns the name of the model's `OutputKind`.

        Examples are "logits", "multilabel", "regression", and "embedding" for a model without a classifier.
        """
        return "logits"

    def output_doubt(self, model: nn.Module) -> str:
        """Returns a note if the kind of the outputs is in doubt. The note names the argument that sets it."""
        return ""

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the class names in the order of the logits, or () if the model has none."""
        return ()

    @abstractmethod
    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """Returns the module that receives the images as its first argument."""

    @abstractmethod
    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns which tokens enter the first layer, and how the tokens after the last layer are pooled.

        Raises:
            NotSupported: No tokens of this model can be pruned.
        """

    @abstractmethod
    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """Returns the norm whose output tokens the model pools."""

    def pooler(self, model: nn.Module) -> nn.Module | None:
        """Returns the attention module that pools the final tokens, or None if the model pools them in another way."""
        return None

    @abstractmethod
    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the classifiers for whole images, or () if the model has none. They take one token or a mean.

        A classifier is a linear map, or an nn.Sequential that contains linear maps (`num_outputs`).
        """

    def token_shape(self, model: nn.Module, heads: int | None = None) -> Shape:
        """Returns the model sizes that token reducers need. `heads` is the original model's number of heads."""
        specs = self.specs(model)
        stored = max((head + 1 for spec in specs for head in spec.heads), default=0)
        return Shape(specs[0].width, heads or stored, self.token_layout(model), depth=len(specs))

    def windows(self, model: nn.Module) -> int:
        """Returns the number of windows: separate token sequences into which the blocks divide an image."""
        return 1

    def grid_axis(self, model: nn.Module) -> int | None:
        """Returns the feature axis of the token grids that blocks take, or None if blocks take token sequences."""
        return None

    @abstractmethod
    def num_tokens(self, model: nn.Module) -> int:
        """Returns the number of tokens per image in every layer, before any token policy removes some."""

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: MLPRanks | None = None,
        tokens: TokenPolicy | None = None,
        hidden: tuple[int, ...] | None = None,
    ) -> ModelCosts:
        """Returns the parameters and MACs in closed form, for the model's present layer sizes or for other sizes.

        You can pass other attention specs, MLP ranks, token policies or numbers of hidden units. Every layer is counted
        with the number of tokens that the policy `tokens` leaves it. By default, the model's own policy is used.

        Raises:
            InvalidInput: The number of specs, pairs of ranks or numbers of units is not the number of layers.
            NotSupported: You passed a policy, but the model has one already, or its tokens cannot be pruned.
        """
        own, maps, attached = self.specs(model), self.mlp(model), reduction_of(model)
        specs = own if attention is None else attention
        ranks = tuple((rank_of(first), rank_of(second)) for first, second in maps) if mlp_ranks is None else mlp_ranks
        units = hidden_units(maps) if hidden is None else hidden
        if len(specs) != len(own) or len(ranks) != len(maps) or len(units) != len(maps):
            raise InvalidInput(
                f"{len(specs)} attention specs, {len(ranks)} pairs of MLP ranks and {len(units)} numbers of hidden "
                f"units for {len(own)} layers and {len(maps)} MLPs of two maps: give one for each."
            )
        if tokens is not None:
            require_all_tokens(model, "compute the costs of a policy on")
            at_tokens = token_costs(tokens, self.token_shape(model), specs)
        elif attached is not None:
            at_tokens = token_costs(attached.policy, attached.shape, specs, attached.by)
        else:
            at_tokens = TokenCosts((self.num_tokens(model),) * len(specs))
        return self.costs_with(model, LayerShapes(specs, ranks, units, at_tokens))

    @abstractmethod
    def costs_with(self, model: nn.Module, shapes: "LayerShapes") -> ModelCosts:
        """Returns the costs that the model would have with these layer shapes."""


class NamedFamily(Family):
    """A family whose models are built from attnrx's own layers, under its own model names (`FAMILIES`)."""

    takes_weights: ClassVar[bool] = False
    """Whether `load` can read published weights into the models."""
    fits_data: ClassVar[bool] = False
    """Whether `attnrx train` builds a new model to fit the training images and their classes."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Returns the names of the models. Every name contains a colon."""

    @abstractmethod
    def fresh(self, name: str, seed: int = 0, **changes: Any) -> nn.Module:
        """Returns a model with fresh weights. `changes` override fields of its configuration."""

    def load(self, name: str, weights: Path | str) -> nn.Module:
        """Returns a model in evaluation mode, with weights from a published file. Needs `takes_weights`.

        Raises:
            CheckpointError: The file cannot be read, or does not fit the model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LayerShapes:
    """The layer shapes that decide what a model costs.

    The fields hold the attention specs, the MLPs' ranks and hidden units (for MLPs of two maps), and the token counts.
    """

    attention: tuple[AttentionSpec, ...]
    mlp_ranks: MLPRanks
    hidden: tuple[int, ...]
    tokens: TokenCosts


def called_with_images(model: nn.Module, images: ImageBatch) -> Any:
    """Calls a module with images as its only argument, and returns the output."""
    return model(images)


def num_outputs(head: nn.Module) -> int:
    """Returns the number of outputs of a classifier's last linear map, or 0 if it contains none."""
    parts = (head, *head.modules()) if type(head) is nn.Sequential else (head,)
    return next((part.out_features for part in reversed(parts) if isinstance(part, nn.Linear)), 0)


def require_ordinary_tensors(model: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Raises an error if a model has weights that attnrx cannot read, compare and store one by one.

    Args:
        model: The model to check.
        blocks: The paths of its blocks, which attnrx changes one by one. A weight inside a block must have only one
            name. Weights outside the blocks may be shared.

    Raises:
        NotSupported: A module is quantized, so its weights are packed, or a block's weight has two names. Also raised
            for tensors that are sparse, quantized, complex or not initialized, and for integer or 8-bit parameters.
        InvalidInput: Weights are on the meta device, or have several floating-point types.
    """
    name, first = type(model).__name__, {}
    inside = tuple(f"{path}." if path else "" for path in blocks)
    for path, part in model.named_modules():
        if ".nn.quantized." in type(part).__module__:
            raise NotSupported(
                f"{path or 'the model'} was quantized by torch: use the model before quantization; `attnrx export --to "
                "int8` quantizes a model for ONNX Runtime."
            )
    # keep_vars returns the parameters themselves. Detached tensors would hide which parameters are shared.
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            raise NotSupported(f"{name} holds {key}, which is not a tensor but {type(value).__name__}.")
        is_other = is_lazy(value) or value.layout is not torch.strided or value.is_quantized or value.is_complex()
        if isinstance(value, nn.Parameter) and not is_other:  # buffers may be integers
            is_other = not value.is_floating_point() or value.element_size() == 1
        if is_other:
            found = "not initialized" if is_lazy(value) else f"{value.dtype}, {value.layout}"
            raise NotSupported(
                f"{key} of {name} is {found}: give a model with dense weights of real floating-point numbers, e.g. "
                "the one before quantization or pruning."
            )
        if value.is_meta:
            raise InvalidInput(f"{name} has no weights: {key} is on the meta device. Build or load it with weights.")
        if value.is_floating_point():
            first.setdefault(value.dtype, key)
        # One dict stores both types and tensor ids, because a dtype never equals an id.
        shared = first.setdefault(id(value), key)
        if shared != key and isinstance(value, nn.Parameter) and (shared.startswith(inside) or key.startswith(inside)):
            raise NotSupported(
                f"{name} shares one tensor between {shared} and {key}, so one cannot be changed without the other. "
                f"Give each its own: model.get_parameter({key!r}) must be a copy."
            )
    dtypes = {kind: key for kind, key in first.items() if isinstance(kind, torch.dtype)}
    if len(dtypes) > 1:
        kinds = " and ".join(f"{kind} ({key})" for kind, key in dtypes.items())
        raise InvalidInput(f"{name} mixes floating-point types: {kinds}. Convert it, e.g. model.float().")
