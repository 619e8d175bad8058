"""What the families of foreign models have in common: adopting, describing, rebuilding and pricing."""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.config import from_dict, to_dict
from attnrx.costs import ModelCosts, PartCosts, layer_costs
from attnrx.errors import InvalidInput, NotSupported
from attnrx.models.adopted import Adapter, Adopted, Origin, require_same
from attnrx.models.counting import matrices, mlp_costs, norm_features, params
from attnrx.models.family import Family
from attnrx.models.last_layer import LastLayer
from attnrx.models.low_rank_linear import LowRankLinear, rank_of
from attnrx.models.token_costs import priced_tokens
from attnrx.models.unsupported_features import Refusal, model_name
from attnrx.spec import AttentionSpec
from attnrx.storage import require_finite
from attnrx.tokens import TokenLayout, TokenPolicy

MLP_MAPS = ("fc1", "fc2")
Ranks = tuple[tuple[int | None, int | None], ...]


class AdoptedFamily(Family):
    """A kind of foreign model. A subclass says what is where and what it refuses; the rest is done here."""

    model_type: type[Adopted]
    adapter_type: type[Adapter]
    attention_name: str
    mlp_types: tuple[str, ...]
    """The MLPs of two linear maps, fc1 and fc2, with an activation between them; others stay as they are."""
    head_names: tuple[str, ...]
    """Where the classifier and the norm before it are, seen from the source; those that a model lacks are skipped."""
    classifier_names: tuple[str, ...]
    """Which of them classify; two, where a distillation token answers too."""
    pooled_names: tuple[str, ...] = ()
    """Which of them see one pooled token instead of all."""

    @abstractmethod
    def adopts(self, model: nn.Module) -> bool:
        """Whether the model comes from this library, so that `adopt` takes it or says why not; imports nothing."""

    @abstractmethod
    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Returns every reason why the model cannot be adopted, without reading its weights."""

    @abstractmethod
    def origin(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Finds out how the model was made and what it takes; what the user stated goes first."""

    @abstractmethod
    def create(self, origin: Origin) -> nn.Module:
        """Makes the model anew with its own library, without weights."""

    @abstractmethod
    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        """The transformer blocks."""

    @abstractmethod
    def own(self, attention: nn.Module) -> Attention:
        """Our attention with the weights of theirs."""

    @abstractmethod
    def norm_before(self, layer: nn.Module) -> str | None:
        """Where a block has the norm before its attention, if any; used where the logits read the class token alone."""

    @abstractmethod
    def patches(self, source: nn.Module) -> nn.Conv2d:
        """The patch embedding."""

    @abstractmethod
    def prefix_tokens(self, source: nn.Module) -> int:
        """Tokens beside the patches: class, distillation and register tokens."""

    @abstractmethod
    def has_class_token(self, source: nn.Module) -> bool:
        """Whether the first token is a class token."""

    @abstractmethod
    def pooling(self, source: nn.Module) -> str:
        """How the answer is read off the tokens: "class", "mean", or another word for what is neither."""

    @abstractmethod
    def last_norm(self, source: nn.Module) -> nn.Module:
        """The norm after the last layer, or what stands in its place."""

    def adopt(
        self,
        model: nn.Module,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        input_shape: tuple[int, int, int] | None = None,
    ) -> Adopted:
        """Returns a deep copy of the model with our attention in every layer; the model itself is left alone.

        Two things are proven on random images before the copy is given out: that its logits are those of the model,
        and that a model rebuilt from its description gives them too. `mean` and `std` override what the model says
        of its images; `input_shape` can do so only for models that resize their positions.

        Raises:
            NotSupported: The model has a feature that is not modelled, named in the message.
        """
        if isinstance(model, Adopted):
            raise InvalidInput(f"{model.origin.architecture} was adopted already.")
        self.require_supported(model)
        require_finite(model.state_dict(), model_name(model))
        origin = self._stated(model, {"mean": mean, "std": std, "input_shape": input_shape})
        adopted = self.model_type(copy.deepcopy(model), origin)
        adopted.training = model.training  # of the wrapper alone: every module inside keeps its own mode
        for layer in self.layers(adopted.source):
            theirs = getattr(layer, self.attention_name)
            setattr(layer, self.attention_name, self.adapter_type(self.own(theirs)).train(theirs.training))
        self._lighten_(adopted)
        require_same(self.model_type(model, origin), adopted, "its attention is not what it seems")
        self._require_rebuilt(adopted)
        return adopted

    def library_model(self, model: nn.Module) -> nn.Module:
        """Makes the model anew with its own library, whose attention it keeps."""
        return self.create(self._adopted(model).origin)

    @abstractmethod
    def fresh(self, name: str, *, on_meta: bool = False, **arguments: Any) -> Adopted:
        """Makes a model by its name with fresh weights; on the meta device, it has none and can only be priced."""

    def outlined(self, model: nn.Module) -> Adopted:
        """Puts our attention into a model without weights, of which nothing can be proven."""
        self.require_supported(model)
        adopted = self.model_type(model, self._stated(model, {}))
        for layer in self.layers(adopted.source):
            setattr(layer, self.attention_name, self.adapter_type(self.own(getattr(layer, self.attention_name))))
        return adopted

    def require_supported(self, model: nn.Module) -> None:
        """Refuses the model, naming every feature that is not modelled; its weights are not looked at."""
        found = tuple(self.refusals(model))
        if found:
            reasons = ", ".join(dict.fromkeys(refusal.reason for refusal in found))
            remedies = dict.fromkeys(refusal.remedy for refusal in found if refusal.remedy)
            raise NotSupported(" ".join((f"{model_name(model)} is not supported: {reasons}.", *remedies)))

    def matches(self, model: nn.Module) -> bool:
        """Whether the model was adopted by this family."""
        return isinstance(model, self.model_type)

    def attention(self, model: nn.Module) -> tuple[Attention, ...]:
        """The attention of every layer."""
        return tuple(adapter.attention for adapter in self._adapters(model))

    def set_attention_(self, model: nn.Module, layer: int, attention: Attention) -> None:
        """Replaces one layer's attention; its spec is its description."""
        adapter = self._adapters(model)[layer]
        adapter.attention = attention.train(adapter.attention.training)

    def mlp(self, model: nn.Module) -> tuple[tuple[nn.Module, nn.Module], ...]:
        """The two linear maps (or their low-rank forms) of every layer's MLP; () where the model has another kind."""
        mlps = [layer.get_submodule("mlp") for layer in self.layers(self._adopted(model).source)]
        if not all(type(mlp).__name__ in self.mlp_types for mlp in mlps):
            return ()
        return tuple((mlp.get_submodule(MLP_MAPS[0]), mlp.get_submodule(MLP_MAPS[1])) for mlp in mlps)

    def set_mlp_(self, model: nn.Module, layer: int, which: int, linear: nn.Module) -> None:
        """Puts another map into one layer's MLP, the first (0) or the second (1)."""
        if not self.mlp(model):
            raise NotSupported(f"{self._adopted(model).origin.architecture} has no MLPs of two linear maps.")
        mlp, name = self.layers(self._adopted(model).source)[layer].mlp, MLP_MAPS[which]
        setattr(mlp, name, linear.train(getattr(mlp, name).training))

    def describe(self, model: nn.Module) -> dict[str, Any]:
        """How the model was made, the spec of every layer's attention, and the ranks of its MLP."""
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
        """Makes the described model with its own library, and puts attention and MLPs of the described ranks in."""
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
        """Removes dropout at rate 0, and computes only the class token in the last block where the head reads nothing
        else."""
        source, layers = adopted.source, self.layers(adopted.source)
        for layer in layers:
            _without_idle_dropout_(layer)
        if layers and self.pooling(source) == "class":
            norm, after, prefix = self.norm_before(layers[-1]), self.last_norm(source), self.prefix_tokens(source)
            adopted.last = LastLayer(layers[-1], self.attention_name, norm, after, prefix)

    def input_shape(self, model: nn.Module) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self._adopted(model).origin.input_shape

    def normalization(self, model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that the images are normalized with."""
        origin = self._adopted(model).origin
        return origin.mean, origin.std

    def token_layout(self, model: nn.Module) -> TokenLayout:
        """The tokens before the first layer, and how the answer is read off those after the last."""
        adopted = self._adopted(model)
        source, pooled = adopted.source, self.pooling(adopted.source)
        if pooled not in ("class", "mean"):
            raise NotSupported(
                f"{adopted.origin.architecture} reads its answer off the tokens by {pooled!r}; tokens can leave only "
                "where it is a token before the patches, or the mean of the patches."
            )
        return TokenLayout(self.prefix_tokens(source), self._positions(adopted), self.has_class_token(source), pooled)

    def patch_embedding(self, model: nn.Module) -> nn.Module:
        """The convolution."""
        return self.patches(self._adopted(model).source)

    def pooled_norm(self, model: nn.Module) -> nn.Module:
        """The norm after the last layer."""
        return self.last_norm(self._adopted(model).source)

    def heads(self, model: nn.Module) -> tuple[nn.Linear, ...]:
        """Every classifier that the source has."""
        named = dict(self._adopted(model).source.named_modules())
        found = (named.get(name) for name in self.classifier_names)
        return tuple(head for head in found if isinstance(head, nn.Linear))

    def _positions(self, adopted: Adopted) -> int:
        (height, width), (down, right) = adopted.origin.input_shape[1:], self.patches(adopted.source).stride
        return (height // down) * (width // right)

    def set_normalization_(self, model: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """States that the model was trained with images normalized in another way; it is saved with the model."""
        adopted = self._adopted(model)
        adopted.origin = replace(adopted.origin, mean=tuple(mean), std=tuple(std))

    def costs(
        self,
        model: nn.Module,
        attention: tuple[AttentionSpec, ...] | None = None,
        mlp_ranks: Ranks | None = None,
        tokens: TokenPolicy | None = None,
    ) -> ModelCosts:
        """Prices the model, with other specs, ranks and tokens in its layers on request.

        Everything learned before the first layer (tokens and positions too) counts as patches, everything learned in a
        layer beside attention and MLP (LayerScale too) as its norms, so the parameters add up to all of the model.
        """
        adopted = self._adopted(model)
        layers, maps = self.layers(adopted.source), self.mlp(adopted)
        specs = tuple(own.spec for own in self.attention(model)) if attention is None else attention
        wanted = mlp_ranks
        if wanted is None:
            wanted = tuple((rank_of(first), rank_of(second)) for first, second in maps)
        if len(specs) != len(layers) or len(wanted) != len(maps):
            raise InvalidInput(
                f"{len(specs)} attention specs and {len(wanted)} pairs of MLP ranks for {len(layers)} layers and "
                f"{len(maps)} MLPs of two maps: give one for each."
            )
        patches = self.patches(adopted.source)
        positions = self._positions(adopted)
        priced = priced_tokens(model, self, tokens, specs, positions + self.prefix_tokens(adopted.source))
        heads = [module for name, module in adopted.source.named_modules() if name in self.head_names]
        classifier = sum(params(module) for module in heads)
        before = params(adopted.source) - classifier - sum(params(layer) for layer in layers)
        changes = [tuple(zip(*pair, strict=True)) for pair in zip(maps, wanted, strict=True)] or [()] * len(layers)
        return ModelCosts(
            patches=PartCosts(before, positions * patches.weight.numel()),
            layers=tuple(
                replace(
                    layer_costs(spec, own, 0),
                    mlp=mlp_costs(layer.get_submodule("mlp"), own, change),
                    layer_norms=PartCosts(params(layer, without=(self.attention_name, "mlp"))),
                )
                for layer, spec, change, own in zip(layers, specs, changes, priced.tokens, strict=True)
            ),
            classifier=PartCosts(classifier),
            classifier_macs=sum(matrices(head) for head in heads),
            predictors=priced.predictors,
            predictor_norm_features=priced.norm_features,
            outer_norm_features=self._outer_norm_features(adopted.source, positions, priced.tokens),
        )

    def _outer_norm_features(self, source: nn.Module, positions: int, tokens: tuple[int, ...]) -> int:
        """Features of the norms outside the layers: of the patches, of all tokens, or of one pooled token."""
        last = self.last_norm(source)
        inside = {module for layer in self.layers(source) for module in layer.modules()}
        total = 0
        for name, module in source.named_modules():
            features = norm_features(module)
            if features and module not in inside:
                left = tokens[-1] if module is last else tokens[0]
                state = positions if name.startswith("patch_embed.") else left
                total += features * (1 if name in self.pooled_names else state)
        return total

    def _factor_(self, adopted: Adopted, layer: int, which: int, rank: int | None) -> None:
        if rank is not None:
            whole: Any = self.mlp(adopted)[layer][which]
            factors = LowRankLinear(whole.in_features, whole.out_features, rank, whole.bias is not None)
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
            raise InvalidInput(f"{model_name(model)} was not adopted by the family {self.name!r}.")
        return model

    def _require_rebuilt(self, adopted: Adopted) -> None:
        because = "rebuilt from its name and arguments it is another model, so it was changed after it was made"
        with torch.device("meta"):
            twin = self.build(self.describe(adopted))
        shapes = [{name: tensor.shape for name, tensor in model.state_dict().items()} for model in (adopted, twin)]
        if str(adopted) != str(twin) or shapes[0] != shapes[1]:
            raise NotSupported(f"{adopted.origin.architecture} cannot be adopted: {because}.")
        twin.load_state_dict(adopted.state_dict(), assign=True)
        require_same(adopted, twin, because)


def _without_idle_dropout_(module: nn.Module) -> None:
    """Puts nothing in the place of every dropout of share 0, which takes as long to call as a small product."""
    for name, part in module.named_children():
        if type(part) is nn.Dropout and part.p == 0:
            setattr(module, name, nn.Identity().train(part.training))
        else:
            _without_idle_dropout_(part)
