"""The interface through which attnrx finds, changes, describes and rebuilds the layers of one kind of model."""

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
    """Returns the name of the `OutputKind` that the user passed for a model, or None if the user passed none."""
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
    """The base class of model families. Each family reads and changes one kind of model.

    A family stores no state. Only methods with a trailing underscore change a model.

    Raises:
        InvalidInput: A method was called with a model of another family.
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
        """Wraps a loaded model in the type that this family's methods accept. Do not change the result."""
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
        """Returns the attention module that the model itself calls in a layer, not a converted copy."""
        return self.attention(model)[layer]

    def attention_and_mlp(self, model: nn.Module, layer: int) -> tuple[nn.Module, nn.Module]:
        """Returns the modules that a block calls as its attention and as its MLP.

        Raises:
            NotSupported: The blocks of this family do not call such modules.
        """
        raise NotSupported(f"the blocks of {type(model).__name__} are no modules with an attention and an MLP.")

    def restored_blocks(self, model: nn.Module) -> Container[int] | None:
        """Returns the indices of the blocks after which all patches are needed, even if tokens are pruned or merged.

        For models built from attnrx's own layers, the result is None.
        """
        return None

    @abstractmethod
    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Returns the two linear maps (possibly factored) of every layer's MLP, or () for MLPs of another kind."""

    def reads_attention(self, model: nn.Module) -> bool:
        """Returns whether the family can read the model's attention. If not, it reads only the MLP of each layer."""
        return True

    @abstractmethod
    def block_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns every block's path. If attention cannot be read, a block is the module that contains an MLP."""

    def keep_units_(self, model: nn.Module, layer: int, keep: Bool[Tensor, "units"]) -> None:  # noqa: B027
        """Prunes gates, norms and convolutions between an MLP's two linear maps to the hidden units in `keep`."""

    def has_plain_units(self, model: nn.Module) -> bool:
        """Returns whether the two linear maps of every MLP have only an activation between them."""
        return bool(self.mlp(model))

    @abstractmethod
    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces the first (`which=0`) or second (`which=1`) linear map of an MLP, and updates the description."""

    @abstractmethod
    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns a JSON-ready description from which `build` creates the same model, without its weights."""

    @abstractmethod
    def build(self, description: Mapping[str, Any]) -> nn.Module:
        """Builds a model from its description. When a saved model is loaded, this runs on the meta device."""

    def library_model(self, model: nn.Module) -> nn.Module:
        """Recreates the model with its own library and random weights, as the baseline for speed ratios."""
        return self.build(self.describe(model))

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns the channels, height and width of the model's input images."""
        return self._own(model).origin.input_shape

    @abstractmethod
    def resize_(self, model: nn.Module, height: int, width: int) -> None:
        """Resizes the model, in place, for images of another height and width, as its library does.

        Raises:
            NotSupported: The library cannot resize this model's position embeddings.
            InvalidInput: Patches do not tile images of this size.
        """

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the mean and standard deviation of the image normalization, one value per channel."""
        origin = self._own(model).origin
        return origin.mean, origin.std

    def geometry(self, model: nn.Module) -> ImageGeometry | None:
        """Returns how the library resizes and crops images for evaluation, or None if it does not define this."""
        return None

    def inputs(self, model: nn.Module) -> Any:
        """Returns a description of the model's inputs (`ModuleInputs`), or None if the model takes images."""
        return None

    def accepts_(self, model: nn.Module, shape: tuple[int, ...]) -> bool:
        """Makes a model accept inputs of another shape, in place. Returns False if the family does not support this."""
        return False

    def knows_normalization(self, model: nn.Module) -> bool:
        """Returns whether `normalization` was read from the model. If not, it is a common default."""
        return True

    def processor_config(self, model: nn.Module) -> dict[str, Any]:
        """Returns the content of transformers' preprocessor_config.json for a saved model, or {} if there is none."""
        return {}

    @abstractmethod
    def patch_features(self, model: nn.Module, images: ImageBatch) -> Float[Tensor, "batch patches features"]:
        """Returns the final features of all patches of the images. Pruned or merged patches are restored first."""

    def saved_names(self, model: nn.Module) -> Mapping[str, str]:
        """Maps weight names in the library's files to the model's weight names. Returns {} if they are the same."""
        return {}

    def caller(self, model: nn.Module) -> Callable[[nn.Module, ImageBatch], Any]:
        """Returns a function that calls the model (or a copy of it) with images, and returns its output.

        The output has one row per image. If the model is part of a user's module, the module's output is returned.
        """
        return called_with_images

    def output_kind(self, model: nn.Module) -> str:
        """Returns the name of the model's `OutputKind`.

        Examples of kinds are "logits", "multilabel", "regression", and "embedding" for a model without a classifier.
        """
        return "logits"

    def output_doubt(self, model: nn.Module) -> str:
        """Returns a note if the `OutputKind` is uncertain, or "". The note names the argument that sets the kind."""
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
        """Returns the image classifiers, or () if the model has none. A classifier takes one token or a mean of tokens.

        A classifier is a linear map, or an nn.Sequential that contains linear maps (`num_outputs`).
        """

    def token_shape(self, model: nn.Module, heads: int | None = None) -> Shape:
        """Returns the model sizes that token pruning and merging need. `heads` is the head count before pruning."""
        specs = self.specs(model)
        stored = max((head + 1 for spec in specs for head in spec.heads), default=0)
        return Shape(specs[0].width, heads or stored, self.token_layout(model), depth=len(specs))

    def windows(self, model: nn.Module) -> int:
        """Returns the number of windows (separate token sequences) into which the blocks divide an image."""
        return 1

    def sequences(self, model: nn.Module) -> tuple[tuple[int, ...], ...]:
        """Returns the lengths of the token sequences of one input, for every layer, before tokens are merged."""
        return ((self.num_tokens(model),),) * len(self.specs(model))

    def grid_axis(self, model: nn.Module) -> int | None:
        """Returns the axis of the features in the token grids that blocks take, or None if blocks take sequences."""
        return None

    @abstractmethod
    def num_tokens(self, model: nn.Module) -> int:
        """Returns the number of tokens per image in every layer, before tokens are pruned or merged."""

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: MLPRanks | None = None,
        tokens: TokenPolicy | None = None,
        hidden: tuple[int, ...] | None = None,
    ) -> ModelCosts:
        """Computes a model's parameters and MACs in closed form, for its current layer sizes or for other sizes.

        You can pass other attention specs, MLP ranks or numbers of hidden units, or a token policy. By default, the
        model's own sizes and policy are used. The MACs of a layer are counted for the tokens that the policy keeps.

        Raises:
            InvalidInput: `attention`, `mlp_ranks` or `hidden` does not have one entry per layer.
            NotSupported: You passed a token policy, but the model has one already, or its tokens cannot be pruned.
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
        """Returns the parameters and MACs that the model would have with these layer shapes."""


class NamedFamily(Family):
    """A family of named models that attnrx builds from its own layers (`FAMILIES` lists all families)."""

    takes_weights: ClassVar[bool] = False
    """Whether `load` can read published weights into the models."""
    fits_data: ClassVar[bool] = False
    """Whether `attnrx train` builds a new model to fit the training images and their classes."""

    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Returns the names of the models. Every name contains a colon."""

    @abstractmethod
    def fresh(self, name: str, seed: int = 0, **changes: Any) -> nn.Module:
        """Creates a model with random weights from `seed`. `changes` override fields of its configuration."""

    def load(self, name: str, weights: Path | str) -> nn.Module:
        """Creates a model with published weights, in evaluation mode. Only families with `takes_weights` support this.

        Raises:
            CheckpointError: The file cannot be read, or does not fit the model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LayerShapes:
    """The layer shapes that decide what a model costs.

    The fields contain the attention spec of each layer, the ranks and the number of hidden units of each MLP, and the
    token counts. The two fields for MLPs are empty if the MLPs do not consist of two linear maps.
    """

    attention: tuple[AttentionSpec, ...]
    mlp_ranks: MLPRanks
    hidden: tuple[int, ...]
    tokens: TokenCosts


def called_with_images(model: nn.Module, images: ImageBatch) -> Any:
    """Calls a model with images as its only argument, and returns the output."""
    return model(images)


def num_outputs(head: nn.Module) -> int:
    """Returns the number of outputs of a classifier's last linear map, or 0 if the classifier has no linear map."""
    parts = (head, *head.modules()) if type(head) is nn.Sequential else (head,)
    return next((part.out_features for part in reversed(parts) if isinstance(part, nn.Linear)), 0)


def require_ordinary_tensors(model: nn.Module, blocks: Iterable[str] = ()) -> None:
    """Raises an error if attnrx cannot read, compare and save each weight of a model.

    Args:
        model: The model to check.
        blocks: The paths of the model's blocks. Weights inside blocks must not be shared, because attnrx changes the
            blocks one by one. Weights outside the blocks may be shared.

    Raises:
        NotSupported: A module is quantized, or a block shares a weight. Also raised for tensors that are sparse,
            quantized, complex or not initialized, and for integer or 8-bit parameters.
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
