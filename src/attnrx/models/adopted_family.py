"""The base class of the families of other libraries: adopt, describe, rebuild, count costs."""

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.costs import ModelCosts
from attnrx.errors import InvalidInput, NotSupported
from attnrx.maps import LINEAR_MAPS
from attnrx.models.adopted import Adapter, Adopted, Origin, require_equal_logits
from attnrx.models.adopted_costs import Ranks, adopted_costs
from attnrx.models.family import Family
from attnrx.models.last_layer import LastLayer
from attnrx.models.library_reader import LibraryReader
from attnrx.models.low_rank_linear import LowRankLinear, rank_of
from attnrx.models.unsupported_features import model_name
from attnrx.serialization.config import from_dict, to_dict
from attnrx.serialization.storage import require_finite_tensors
from attnrx.spec import AttentionSpec
from attnrx.tokens import TokenLayout, TokenPolicy


class AdoptedFamily(LibraryReader, Family):
    """A family of models of another library: adoption by proof, description, rebuilding. See `LibraryReader`."""

    def adopt(
        self,
        model: nn.Module,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        input_shape: tuple[int, int, int] | None = None,
    ) -> Adopted:
        """Returns a deep copy of the model with attnrx attention in every layer; the model itself is not changed.

        Two properties are checked on random images first: the copy returns the logits of the model, and so does a model
        rebuilt from the description of the copy. `mean` and `std` override the model's own normalization; `input_shape`
        overrides its image size, only for models that resize their position embeddings.

        Raises:
            NotSupported: The model has an unsupported feature, named in the message.
        """
        if isinstance(model, Adopted):
            raise InvalidInput(f"{model.origin.architecture} was adopted already.")
        self.require_supported(model)
        require_finite_tensors(model.state_dict(), model_name(model))
        origin = self._stated(model, {"mean": mean, "std": std, "input_shape": input_shape})
        adopted = self.model_type(copy.deepcopy(model), origin)
        adopted.training = model.training  # of the wrapper only: every module inside keeps its own mode
        for layer in self.layers(adopted.source):
            theirs = getattr(layer, self.attention_name)
            setattr(layer, self.attention_name, self.adapter_type(self.own(theirs)).train(theirs.training))
        self._lighten_(adopted)
        require_equal_logits(
            self.model_type(model, origin),
            adopted,
            "its attention computes something else than plain softmax attention",
        )
        self._require_rebuilt(adopted)
        return adopted

    def library_model(self, model: nn.Module) -> nn.Module:
        """Creates the model with its own library, which keeps that library's attention."""
        return self.create(self._adopted(model).origin)

    @abstractmethod
    def fresh(self, name: str, *, on_meta: bool = False, **arguments: Any) -> Adopted:
        """Creates a model by its name with fresh weights, or with none on the meta device, where only its costs are
        available.
        """

    def outlined(self, model: nn.Module) -> Adopted:
        """Puts attnrx attention into a model without weights; its logits cannot be checked."""
        self.require_supported(model)
        adopted = self.model_type(model, self._stated(model, {}))
        for layer in self.layers(adopted.source):
            setattr(layer, self.attention_name, self.adapter_type(self.own(getattr(layer, self.attention_name))))
        return adopted

    def require_supported(self, model: nn.Module) -> None:
        """Raises NotSupported with every unsupported feature of the model; does not read its weights."""
        found = tuple(self.refusals(model))
        if found:
            reasons = ", ".join(dict.fromkeys(refusal.reason for refusal in found))
            remedies = dict.fromkeys(refusal.remedy for refusal in found if refusal.remedy)
            raise NotSupported(" ".join((f"{model_name(model)} is not supported: {reasons}.", *remedies)))

    def matches(self, model: nn.Module) -> bool:
        """Returns whether the model was adopted by this family."""
        return isinstance(model, self.model_type)

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """Returns the attention of every layer."""
        return tuple(adapter.attention for adapter in self._adapters(model))

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Replaces one layer's attention, which carries its own spec."""
        adapter = self._adapters(model)[layer]
        adapter.attention = attention.train(adapter.attention.training)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """Returns the two linear maps (or their low-rank forms) of every layer's MLP; () where the model has another
        kind.
        """
        mlps = [layer.get_submodule("mlp") for layer in self.layers(self._adopted(model).source)]
        if not all(type(mlp).__name__ in self.mlp_types for mlp in mlps):
            return ()
        return tuple((mlp.get_submodule(LINEAR_MAPS[0]), mlp.get_submodule(LINEAR_MAPS[1])) for mlp in mlps)

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Replaces the first (0) or second (1) map of one layer's MLP."""
        if not self.mlp(model):
            raise NotSupported(f"{self._adopted(model).origin.architecture} has no MLPs of two linear maps.")
        mlp, name = self.layers(self._adopted(model).source)[layer].mlp, LINEAR_MAPS[which]
        setattr(mlp, name, linear.train(getattr(mlp, name).training))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Returns how the model was created, the spec of every layer's attention, and the ranks of its MLP."""
        origin = self._adopted(model).origin
        return {
            "architecture": origin.architecture,
            "arguments": dict(origin.arguments),
            "input_shape": list(origin.input_shape),
            "mean": list(origin.mean),
            "std": list(origin.std),
            "attention": [to_dict(attention.spec) for attention in self.attention(model)],
            "mlp_ranks": [[rank_of(linear) for linear in pair] for pair in self.mlp(model)],
        }

    def build(self, description: Mapping[str, Any]) -> Adopted:
        """Creates the described model with its own library, then inserts attention and MLPs of the described ranks."""
        facts = {name: tuple(description[name]) for name in ("input_shape", "mean", "std")}
        origin = Origin(description["architecture"], description["arguments"], **facts)
        adopted = self.model_type(self.create(origin), origin)
        layers, specs = self.layers(adopted.source), description["attention"]
        if len(layers) != len(specs):
            raise InvalidInput(f"{origin.architecture} has {len(layers)} layers, but {len(specs)} are described.")
        for layer, spec in zip(layers, specs, strict=True):
            setattr(layer, self.attention_name, self.adapter_type(Attention(from_dict(spec, (AttentionSpec,)))))
        self._lighten_(adopted)
        for layer, pair in enumerate(description["mlp_ranks"]):
            for which, rank in enumerate(pair):
                self._factor_(adopted, layer, which, rank)
        return adopted

    def _lighten_(self, adopted: Adopted) -> None:
        """Removes dropout of rate 0, and enables the last-layer class-token shortcut for models with class-token
        pooling.
        """
        source, layers = adopted.source, self.layers(adopted.source)
        for layer in layers:
            _without_idle_dropout_(layer)
        if layers and self.pooling(source) == "class":
            norm, after, prefix = self.norm_before(layers[-1]), self.last_norm(source), self.prefix_tokens(source)
            adopted.last = LastLayer(layers[-1], self.attention_name, norm, after, prefix)

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Returns channels, height and width of an image."""
        return self._adopted(model).origin.input_shape

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Returns the mean and standard deviation of the image normalization."""
        origin = self._adopted(model).origin
        return origin.mean, origin.std

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """Returns the tokens before the first layer, and the pooling after the last."""
        adopted = self._adopted(model)
        source, pooled = adopted.source, self.pooling(adopted.source)
        if pooled not in ("class", "mean"):
            raise NotSupported(
                f"{adopted.origin.architecture} pools its tokens by {pooled!r}; tokens can be pruned only where the "
                "head takes a token before the patches, or the mean of the patches."
            )
        return TokenLayout(self.prefix_tokens(source), self.positions(adopted), self.has_class_token(source), pooled)

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """Returns the convolution of the patch embedding."""
        return self.patches(self._adopted(model).source)

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """Returns the norm after the last layer."""
        return self.last_norm(self._adopted(model).source)

    def heads(self, model: nn.Module) -> tuple[nn.Linear, ...]:
        """Returns every classifier of the source."""
        named = dict(self._adopted(model).source.named_modules())
        found = (named.get(name) for name in self.classifier_names)
        return tuple(head for head in found if isinstance(head, nn.Linear))

    def positions(self, adopted: Adopted) -> int:
        """Returns the number of patches of an image."""
        (height, width), (down, right) = adopted.origin.input_shape[1:], self.patches(adopted.source).stride
        return (height // down) * (width // right)

    def set_normalization_(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Records that the model was trained with images normalized in another way; this is saved with the model."""
        adopted = self._adopted(model)
        adopted.origin = replace(adopted.origin, mean=tuple(mean), std=tuple(std))

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: Ranks | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Returns the costs of the model, optionally with other specs, ranks and tokens in its layers.

        All parameters before the first layer (tokens and position embeddings too) count as patches. Parameters of a
        layer outside attention and MLP (LayerScale too) count as its norms. The parameters therefore add up to those of
        the model.
        """
        return adopted_costs(self, self._adopted(model), attention, mlp_ranks, tokens)

    def _factor_(self, adopted: Adopted, layer: int, which: int, rank: int | None) -> None:
        if rank is not None:
            linear: Any = self.mlp(adopted)[layer][which]
            factors = LowRankLinear(linear.in_features, linear.out_features, rank, linear.bias is not None)
            self.set_mlp_(adopted, layer, which, factors)

    def _stated(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        origin = self.origin(model, stated)
        (height, width), (down, right) = origin.input_shape[1:], self.patches(model).stride
        if height % down or width % right:
            raise InvalidInput(f"{origin.architecture}: patches of {down} x {right} do not tile {height} x {width}.")
        return origin

    def _adapters(self, model: nn.Module) -> tuple[Adapter, ...]:
        return tuple(getattr(layer, self.attention_name) for layer in self.layers(self._adopted(model).source))

    def _adopted(self, model: nn.Module) -> Adopted:
        if not isinstance(model, self.model_type):
            raise InvalidInput(
                f"{model_name(model)} was not adopted by the family {self.name!r}; call attnrx.load(model) first."
            )
        return model

    def _require_rebuilt(self, adopted: Adopted) -> None:
        because = "a model rebuilt from its name and arguments differs, so it was changed after it was created"
        with torch.device("meta"):
            rebuilt = self.build(self.describe(adopted))
        shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (adopted, rebuilt)]
        if str(adopted) != str(rebuilt) or shapes[0] != shapes[1]:
            raise NotSupported(f"{adopted.origin.architecture} cannot be adopted: {because}.")
        rebuilt.load_state_dict(adopted.state_dict(), assign=True)
        require_equal_logits(adopted, rebuilt, because)


def _without_idle_dropout_(module: nn.Module) -> None:
    """Replaces every dropout of rate 0 by an identity: calling a dropout takes as long as a small matrix product."""
    for name, part in module.named_children():
        if type(part) is nn.Dropout and part.p == 0:
            setattr(module, name, nn.Identity().train(part.training))
        else:
            _without_idle_dropout_(part)
