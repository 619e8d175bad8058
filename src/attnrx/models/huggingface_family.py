"""The family of the Vision Transformers of transformers, with or without a classifier."""

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.models.adopted import Adapter, Adopted, Origin, assembled, image_shape
from attnrx.models.adopted_family import AdoptedFamily, ModelPaths
from attnrx.models.huggingface_readers import READERS, VISION_PARTS, reader_of
from attnrx.models.token_hooks import reduction_of
from attnrx.models.unsupported_features import Refusal, changed_linears, features
from attnrx.serialization.hub import local_copies_if_unreachable
from attnrx.serialization.storage import read_json
from attnrx.shapes import ImageBatch, Tensor, TokenBatch

PREFIX = ("cls_token", "distillation_token", "register_tokens", "class_embedding")
NORMS_BEFORE = ("layernorm_before", "norm1", "layer_norm1")
CLASSIFIERS = ("classifier", "cls_classifier", "distillation_classifier")


def is_transformers_folder(folder: Path | str) -> bool:
    """Returns whether the folder has a config.json written by transformers."""
    path = Path(folder) / "config.json"
    record = read_json(path) if path.is_file() else None
    return isinstance(record, Mapping) and "model_type" in record and "kind" not in record


class HuggingFaceModel(Adopted):
    """A Vision Transformer of transformers with attnrx attention.

    Called with images it returns the logits or the embedding, as every model here; called with `pixel_values=...` it
    returns the output of transformers, so that it runs in pipelines and trainers of transformers.
    """

    def forward(
        self,
        images: ImageBatch | None = None,
        *,
        pixel_values: ImageBatch | None = None,
        labels: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Returns logits for images; for `pixel_values`, the output of transformers, with a loss where labels are
        given.

        Raises:
            InvalidInput: Both or neither were given, or images of another shape.
        """
        if images is not None and pixel_values is None and labels is None:
            return super().forward(images)
        if images is not None or pixel_values is None:
            raise InvalidInput("give images, or pixel_values=... (with labels=... or not) as transformers does.")
        reader, optional = reader_of(self.source), {} if labels is None else {"labels": labels}
        if options.get("output_hidden_states", self.config.output_hidden_states):
            return self._with_hidden_states(pixel_values, {**optional, **options})
        with self.restoring(() if reader.answer == "logits" else (self._depth - 1,)):
            return self.source(pixel_values=pixel_values, **optional, **options)

    def _with_hidden_states(self, images: ImageBatch, options: dict[str, Any]) -> Any:
        """Returns the output of transformers with the tokens of all patches after every block."""
        as_tuple = not options.pop("return_dict", self.config.return_dict)
        with self.restoring(range(self._depth)):
            output = self.source(pixel_values=images, return_dict=True, **options)
        for module in self.source.modules():
            for hook in module._forward_hooks.values():
                if getattr(hook, "__name__", "") == "output_capturing_hook":
                    # transformers never removes it, and it is idle unless hidden states are requested.
                    hook.by_image = True  # type: ignore[attr-defined, reportFunctionMemberAccess]
        reader = reader_of(self.source)
        if reader.answer == "logits" and reader.pooling != "class" and reduction_of(self) is not None:
            # The mean over restored patches is not the one that the classifier takes.
            with self.restoring(()):
                answer = self.source(pixel_values=images, return_dict=True, **options | {"output_hidden_states": False})
            for name in {"loss", "logits"} & answer.keys():
                output[name] = answer[name]
        return output.to_tuple() if as_tuple else output

    def _last_tokens(self, images: Tensor) -> Tensor:
        with self.restoring((self._depth - 1,)):
            return reader_of(self.source).body_of(self.source)(pixel_values=images).last_hidden_state

    @property
    def _depth(self) -> int:
        reader = reader_of(self.source)
        return len(list(reader.body_of(self.source).get_submodule(reader.layers).children()))

    # Pipelines and trainers of transformers read these of every model.
    @property
    def config(self) -> Any:
        return self.source.config

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def can_generate(self) -> bool:
        return False

    def logits(self, images: Tensor) -> Tensor:
        """Returns the logits or the embedding, without the outputs that attnrx attention does not provide."""
        output = self.source(pixel_values=images, output_attentions=False, return_dict=True)
        return reader_of(self.source).answer_of(output)


class HuggingFaceAttention(Adapter):
    """attnrx attention with the call signature of a transformers layer; returns no attention weights."""

    def forward(
        self, hidden_states: TokenBatch, attention_mask: Tensor | None = None, **options: Any
    ) -> tuple[TokenBatch, None]:
        """Returns the attention output; raises NotSupported for masks and requests for the attention weights.

        During export, transformers passes an explicit mask that includes every token; it is ignored.
        """
        if attention_mask is not None and not torch.compiler.is_exporting():
            raise NotSupported("attention_mask is not supported in an adopted model.")
        if options.get("output_attentions"):
            raise NotSupported(
                "output_attentions=True: an adopted model returns no attention weights. Observe its layers with "
                "attnrx.models.observation_hooks instead."
            )
        return self.mixed(hidden_states), None


class HuggingFaceFamily(AdoptedFamily):
    """`hf:ID` or `hf:FOLDER`, and any instance of the classes in `READERS`."""

    name = "huggingface"
    library = "transformers"
    model_type = HuggingFaceModel
    adapter_type = HuggingFaceAttention

    def paths(self, source: nn.Module) -> ModelPaths:
        reader = reader_of(source)
        norm, head, pooler = (f"{reader.body}.{name}".strip(".") for name in (reader.norm, "head", "pooler"))
        heads = (*CLASSIFIERS, "visual_projection", norm, head, pooler)
        # The norm of a tower with a class token is applied to that token only.
        pooled = (f"{head}.layernorm", *((norm,) if reader.word == "CLIP" else ()))
        return ModelPaths(
            reader.attention, reader.patches, reader.norm, (f"{reader.word}MLP",), heads, CLASSIFIERS, pooled
        )

    def output_kind(self, model: nn.Module) -> str:
        return "logits" if reader_of(self._adopted(model).source).answer == "logits" else "embedding"

    def load(self, source: Path | str, **changes: Any) -> Adopted:
        """Reads a model from a local folder, or from the hub by its id, and adopts it in evaluation mode.

        A model is read as the class that it was saved as, if it is one of `READERS`, else as an image classifier; of
        CLIP and SigLIP the image tower is read.

        Mean, std and image size come from the image processor in the same folder; without one they are 0.5 and the size
        in the configuration. `changes` override fields of the configuration.
        """
        with local_copies_if_unreachable(source) as unreachable:
            try:
                kind = _class_of(_transformers("AutoConfig").from_pretrained(source))
                model, report = kind.from_pretrained(source, output_loading_info=True, **changes)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                reason = f"{unreachable}." if unreachable else error
                raise CheckpointError(
                    f"hf:{source} cannot be read as an image classifier or an image tower: {reason} Give a folder "
                    "written by save_pretrained, or the id of such a model on the hub."
                ) from error
        missing = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
        if missing:
            raise CheckpointError(
                f"hf:{source} lacks weights of {type(model).__name__}: {', '.join(missing[:4])} would be random. "
                "Fine-tune it as a classifier first, and save the result."
            )
        return self.adopt(model, **_processor(source, _resizes(model))).eval()

    def preprocessing(self, model: nn.Module) -> Callable[[Any], Tensor] | None:
        """Returns the image processor of transformers that was saved with the model; None where there is none."""
        config: Any = self._adopted(model).source.config
        source = config._name_or_path
        processor = _image_processor(source) if source else None
        if processor is None:
            return None
        return lambda picture: processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    def initialized(self, name: str, **arguments: Any) -> nn.Module:
        with local_copies_if_unreachable(name) as unreachable:
            try:
                config = _transformers("AutoConfig").from_pretrained(name, **arguments)
            except (OSError, ValueError, KeyError) as error:
                reason = unreachable or error
                raise CheckpointError(f"hf:{name} has no readable configuration: {reason}") from error
        # Weights are drawn on the CPU, so that they do not depend on the default device.
        place = "meta" if torch.get_default_device().type == "meta" else "cpu"
        with torch.random.fork_rng(devices=[]), torch.device(place):
            torch.manual_seed(0)
            kind = _class_of(config)
            return kind.from_config(config) if hasattr(kind, "from_config") else kind(config)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields unsupported classes of models or attention, and unsupported features."""
        yield from features(model)
        name = type(model).__name__
        if name not in READERS or not self.adopts(model):
            yield Refusal(f"the class {name} has no reader", f"Of transformers, attnrx adopts {', '.join(READERS)}.")
            return
        config: Any = model.config
        if config.output_attentions:
            yield Refusal("a configuration with output_attentions=True (attnrx attention returns no attention weights)")
        for layer in self.layers(model):
            attention: Any = getattr(layer, reader_of(model).attention)
            if type(attention).__name__ != f"{reader_of(model).word}Attention":
                yield Refusal(f"the attention {type(attention).__name__} has no reader")
                continue
            yield from changed_linears(attention, _projections(attention))
            if getattr(attention, "attention_dropout", 0) or getattr(attention, "dropout", 0):
                name = (
                    "attention_probs_dropout_prob" if hasattr(attention, "attention_dropout") else "attention_dropout"
                )
                yield Refusal(f"dropout inside attention (load it with {name}=0.0)")

    def origin(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Reads the configuration; mean and std are 0.5, as in ViTImageProcessor, unless stated."""
        name, config = type(model).__name__, model.config
        arguments = json.loads(config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
        arguments.pop("_name_or_path", None)  # the source path is no part of the model
        reader, embedding = reader_of(model), self.body(model).get_submodule("embeddings")
        size: Any = getattr(embedding, "patch_embeddings", embedding).image_size
        own = image_shape((self.patches(model).in_channels, *((size, size) if isinstance(size, int) else size)))
        shape = image_shape(stated.get("input_shape") or own)
        if shape != own and not (reader.resizes and shape[0] == own[0]):
            raise InvalidInput(f"{name} takes images of {own}, not of {shape}.")
        half = (0.5,) * own[0]
        return Origin(name, arguments, shape, tuple(stated.get("mean") or half), tuple(stated.get("std") or half))

    def create(self, origin: Origin) -> nn.Module:
        """Creates the class from its configuration."""
        if origin.architecture not in READERS:
            raise UnknownName("class of transformers", origin.architecture, READERS)
        kind = _transformers(origin.architecture)
        model = kind(kind.config_class.from_dict(dict(origin.arguments)))
        for module in model.modules():  # not in the weights, so that those of a model on the meta device would be lost
            positions = module._buffers.get("position_ids")
            if positions is not None and positions.is_meta:
                module.position_ids = torch.arange(positions.shape[1], device="cpu")[None]
        return model

    def _install_(self, adopted: Adopted, attention: Sequence[Attention]) -> None:
        super()._install_(adopted, attention)
        for layer in self.layers(adopted.source):
            mask = inspect.signature(layer.forward).parameters.get("attention_mask")
            if mask is not None and mask.default is inspect.Parameter.empty:
                layer.register_forward_pre_hook(_without_mask, with_kwargs=True)

    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        return tuple(self.body(source).get_submodule(reader_of(source).layers).children())

    def body(self, source: nn.Module) -> nn.Module:
        return reader_of(source).body_of(source)

    def own(self, source: nn.Module, attention: nn.Module) -> Attention:
        theirs: Any = attention
        towers = hasattr(theirs, "num_heads")  # of CLIP and SigLIP
        heads, scale = (theirs.num_heads, theirs.scale) if towers else (theirs.num_attention_heads, theirs.scaling)
        linears: list[nn.Linear] = [getattr(theirs, name) for name in _projections(theirs)]
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return assembled(weights, biases, heads, scale)

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the labels of the configuration, unless they are the placeholders LABEL_0, LABEL_1, ..."""
        if self.output_kind(model) != "logits":
            return ()
        config: Any = self._adopted(model).source.config
        names = tuple(config.id2label[index] for index in sorted(config.id2label))
        return () if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names

    def norm_before(self, layer: nn.Module) -> str | None:
        return next((name for name in NORMS_BEFORE if hasattr(layer, name)), None)

    def prefix_tokens(self, source: nn.Module) -> int:
        own = self.body(source).get_submodule("embeddings").named_parameters(recurse=False)
        return sum(token.shape[1] if token.ndim == 3 else 1 for name, token in own if name in PREFIX)

    def has_class_token(self, source: nn.Module) -> bool:
        return self.prefix_tokens(source) > 0

    def pooling(self, source: nn.Module) -> str:
        """Returns the pooling; DINOv2 classifies the class token concatenated with the mean of the patches."""
        return reader_of(source).pooling


def _without_mask(layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Adds the mask that the layers of a tower require, so that all blocks can be called with tokens alone."""
    return args, kwargs if len(args) > 1 else {"attention_mask": None, **kwargs}


_without_mask.by_image = True  # type: ignore[attr-defined]


def _projections(attention: nn.Module) -> tuple[str, ...]:
    return "q_proj", "k_proj", "v_proj", "o_proj" if hasattr(attention, "o_proj") else "out_proj"


def _class_of(config: Any) -> Any:
    """Returns the class that a configuration was saved with, or the automatic class of image classifiers."""
    saved = next(iter(config.architectures or ()), "")
    name = VISION_PARTS.get(saved, saved)
    return _transformers(name if name in READERS else "AutoModelForImageClassification")


def _transformers(name: str) -> Any:
    try:
        return getattr(importlib.import_module("transformers"), name)
    except ModuleNotFoundError as error:
        raise NotSupported(
            f"models of Hugging Face need the package transformers ({error}): pip install transformers."
        ) from error


def _image_processor(source: Path | str) -> Any:
    """Returns the image processor saved with a model, or None."""
    try:
        with local_copies_if_unreachable(source):
            return _transformers("AutoImageProcessor").from_pretrained(source)
    except (OSError, ValueError):  # saved without an image processor
        return None


def _resizes(source: nn.Module) -> bool:
    """Returns whether the model accepts images of another size."""
    name = type(source).__name__
    return name in READERS and READERS[name].resizes


def _processor(source: Path | str, resizes: bool) -> dict[str, Any]:
    """Returns the input format from the saved image processor; empty where there is none."""
    processor = _image_processor(source)
    if processor is None:
        return {}
    facts: dict[str, Any] = {"mean": processor.image_mean, "std": processor.image_std}
    size = dict((processor.crop_size if getattr(processor, "do_center_crop", None) else processor.size) or {})
    if resizes and {"height", "width"} <= size.keys():
        facts["input_shape"] = (len(processor.image_mean), size["height"], size["width"])
    return facts
