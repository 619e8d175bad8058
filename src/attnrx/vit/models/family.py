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
"""The ranks of the two maps of every layer's MLP. None stands for a map that is one matrix."""

STATED_OUTPUTS = "stated_outputs"
"""The attribute of a model that contains the name of the `OutputKind` that its user stated. Copies of the model keep
it. If a model has a record, the name is stored there instead."""


def stated_outputs(model: nn.Module) -> str | None:
    """Returns the name of the `OutputKind` that the user of a model stated, or None."""
    record = record_of(model)
    return vars(model).get(STATED_OUTPUTS) if record is None else record.outputs


def state_outputs_(model: nn.Module, kind: str) -> None:
    """Stores the name of a model's `OutputKind`."""
    record = record_of(model)
    if record is None:
        setattr(model, STATED_OUTPUTS, kind)
    else:
        vars(model)[RECORD] = replace(record, outputs=kind)


class Family(ABC):
    """One kind of model. A family is stateless, and only its methods with a trailing underscore change a model.

    Raises:
        InvalidInput: A method that takes a model of this family gets another model.
    """

    name: str
    model_type: type[Any]
    """The class of its models."""

    def matches(self, model: nn.Module) -> bool:
        """Returns whether the model is of this family: an instance of its class, or a model with one of its records."""
        return isinstance(model, self.model_type) or self.reads(record_of(model))

    def reads(self, record: Record | None) -> bool:
        """Returns whether a record belongs to a model of this family."""
        return record is not None and record.family == self.name

    def viewed(self, model: nn.Module, record: Record) -> Any:
        """Returns a model with a record in the form that the methods of this family accept. Do not change it."""
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
        """Returns the attention of a layer as the part of the model that computes it."""
        return self.attention(model)[layer]

    def restored_blocks(self, model: nn.Module) -> Container[int] | None:
        """Returns the blocks after which a forward pass needs all patches even if tokens are pruned or merged.

        It is None for attnrx's own models.
        """
        return None

    @abstractmethod
    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Returns the two linear maps (or low-rank forms) of every layer's MLP, or () if MLPs are of another kind."""

    def reads_attention(self, model: nn.Module) -> bool:
        """Returns whether the family reads the attention of the model. Otherwise a layer is just one MLP."""
        return True

    @abstractmethod
    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the path of every layer's block. Without readable attention, it is the part around every MLP."""

    def keep_units_(self, model: nn.Module, layer: int, keep: Bool[Tensor, "units"]) -> None:  # noqa: B027
        """Removes the units outside `keep` from the parts with weights per unit between the two maps of an MLP."""

    def has_plain_units(self, model: nn.Module) -> bool:
        """Returns whether only an activation is between the two maps of every MLP, so the units are separate."""
        return bool(self.mlp(model))

    @abstractmethod
    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces the first (0) or second (1) map of one layer's MLP, and updates the description."""

    @abstractmethod
    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns a JSON-ready description from which `build` creates the same model, without its weights."""

    @abstractmethod
    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds the model from its description. Loading calls it on the meta device."""

    def library_model(self, model: nn.Module) -> nn.Module:
        """Returns the model as its own library creates it, with fresh weights, as the baseline of speed ratios."""
        return self.build(self.describe(model))

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns the channels, height and width of an image."""
        return self._own(model).origin.input_shape

    @abstractmethod
    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        """Resizes the model for images of another height and width, in place, as its library does.

        Raises:
            NotSupported: The library does not resize the position embeddings of this model.
            InvalidInput: Patches do not tile such images.
        """

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the mean and standard deviation of the image normalization, one value per channel."""
        origin = self._own(model).origin
        return origin.mean, origin.std

    def geometry(self, model: nn.Module) -> ImageGeometry | None:
        """Returns how the library turns a picture into pixels for evaluation, or None if the library does not say."""
        return None

    def inputs(self, model: nn.Module) -> Any:
        """Returns the inputs of the model (`ModuleInputs`), or None for images of channels, height and width."""
        return None

    def accepts_(self, model: nn.Module, shape: tuple[int, ...]) -> bool:
        """Changes a model for another number of input channels, if possible, and returns whether it was possible."""
        return False

    def knows_normalization(self, model: nn.Module) -> bool:
        """Returns whether the model itself states `normalization`. Otherwise it is a common default."""
        return True

    def processor_config(self, model: nn.Module) -> dict[str, Any]:
        """Returns transformers' preprocessor_config.json for a saved model, or {} if there is none."""
        return {}

    @abstractmethod
    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        """Returns the last features of all patches in the images. Pruned or merged patches are restored."""

    def saved_names(self, model: nn.Module) -> Mapping[str, str]:
        """Returns the names of weights by their names in the library's files, or {} if both are the same."""
        return {}

    def caller(self, model: nn.Module) -> Callable[[nn.Module, ImageBatch], Any]:
        """Returns a function that takes the model or a copy, and images, and returns the model's answer.

        The answer has one row per image. If the model is inside a module, the answer is the module's output.
        """
        return called_with_images

    def output_kind(self, model: nn.Module) -> str:
        """Returns the name of the `OutputKind` of the model's outputs.

        It is "logits", "multilabel", "regression", or "embedding" for a model without a classifier.
        """
        return "logits"

    def output_doubt(self, model: nn.Module) -> str:
        """Returns a note if the outputs could be of another kind, with the way to state that kind, or "" otherwise."""
        return ""

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the class names in the order of the logits, or () if the model has none."""
        return ()

    @abstractmethod
    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """Returns the module whose first argument is the images."""

    @abstractmethod
    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns the tokens before the first layer, and the pooling after the last one.

        Raises:
            NotSupported: No tokens of this model can be pruned.
        """

    @abstractmethod
    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """Returns the module whose output tokens are pooled."""

    def pooler(self, model: nn.Module) -> nn.Module | None:
        """Returns the attention that pools these tokens, or None if the model pools them in another way."""
        return None

    @abstractmethod
    def heads(self, model: nn.Module) -> tuple[nn.Module, ...]:
        """Returns the classifiers of the whole image, which take one token or a mean, or () if the model has none.

        Each is a linear map, or an nn.Sequential that contains linear maps (`num_outputs`).
        """

    def token_shape(self, model: nn.Module, heads: int | None = None) -> Shape:
        """Returns the model properties that reducers need. `heads` is the number of heads of the original model."""
        specs = self.specs(model)
        stored = max((head + 1 for spec in specs for head in spec.heads), default=0)
        return Shape(specs[0].width, heads or stored, self.token_layout(model), depth=len(specs))

    def windows(self, model: nn.Module) -> int:
        """Returns the number of sequences into which an image's tokens are divided between blocks."""
        return 1

    def grid_axis(self, model: nn.Module) -> int | None:
        """Returns the axis of the features if blocks take grids of tokens, or None if they take sequences."""
        return None

    @abstractmethod
    def num_tokens(self, model: nn.Module) -> int:
        """Returns an image's number of tokens in every layer without a token policy."""

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: MLPRanks | None = None,
        tokens: TokenPolicy | None = None,
        hidden: tuple[int, ...] | None = None,
    ) -> ModelCosts:
        """Returns the parameters and MACs in closed form, for the model as it is or with other layer sizes.

        You can pass other specs, MLP ranks, token policies or numbers of hidden units. Every layer is counted with its
        own number of tokens, under the policy `tokens`. Without it, the policy attached to the model applies.

        Raises:
            InvalidInput: The number of specs, pairs of ranks or numbers of units is not the number of layers.
            NotSupported: A policy was given for a model that has one already, or whose tokens cannot be pruned.
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
        """Returns the costs of the model with these shapes in its layers."""


class NamedFamily(Family):
    """A family of models that are built from attnrx's layers, under its own names (`FAMILIES`)."""

    takes_weights: ClassVar[bool] = False
    """Whether `load` takes published weights."""
    fits_data: ClassVar[bool] = False
    """Whether a new model is built for the images and classes that it is trained on (`attnrx train`)."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Returns the names of the models, each with a colon."""

    @abstractmethod
    def fresh(self, name: str, seed: int = 0, **changes: Any) -> nn.Module:
        """Returns an initialized model with one of the names. `changes` override fields of its configuration."""

    def load(self, name: str, weights: Path | str) -> nn.Module:
        """Returns a model with the weights of a published file, in evaluation mode, if the family `takes_weights`.

        Raises:
            CheckpointError: The file cannot be read, or does not fit the model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LayerShapes:
    """The shapes that determine the costs of the layers.

    They are the specs of the attention, the ranks and hidden units of the MLPs (if they have two maps), and the tokens.
    """

    attention: tuple[AttentionSpec, ...]
    mlp_ranks: MLPRanks
    hidden: tuple[int, ...]
    tokens: TokenCosts


def called_with_images(model: nn.Module, images: ImageBatch) -> Any:
    """Returns the output of a module that gets only images."""
    return model(images)


def num_outputs(head: nn.Module) -> int:
    """Returns the number of outputs of a classifier if it is or contains a linear map (`nn.Sequential`), else 0."""
    parts = (head, *head.modules()) if type(head) is nn.Sequential else (head,)
    return next((part.out_features for part in reversed(parts) if isinstance(part, nn.Linear)), 0)


def require_ordinary_tensors(model: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Raises an error for a model whose weights cannot be read, compared and stored one by one.

    Args:
        model: The model.
        blocks: The paths of its blocks, which are changed one by one. Outside of them, two names may share a weight.

    Raises:
        NotSupported: There is a quantized module, whose weights are packed, or a block's weight has two names. Or a
            tensor is sparse, quantized, complex or not initialized, or a parameter has integers or 8-bit numbers.
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
    # keep_vars, because a state dict contains detached tensors. Only the parameters themselves show which are shared.
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
        # One dict for both, because a dtype and the id of a tensor are different keys.
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
