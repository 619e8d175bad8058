"""The family of the image classifiers of transformers: ViT, DeiT and DINOv2, adopted with attnrx attention."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.attention import Attention
from attnrx.errors import CheckpointError, InvalidInput, NotSupported, UnknownName
from attnrx.models.adopted import Adapter, Adopted, Origin, assembled, image_shape
from attnrx.models.adopted_family import AdoptedFamily
from attnrx.models.unsupported_features import Refusal, changed_linears, features
from attnrx.serialization.hub import local_copies_if_unreachable
from attnrx.serialization.storage import read_json
from attnrx.shapes import ImageBatch, Tensor, TokenBatch

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
CLASSES = (
    "ViTForImageClassification",
    "DeiTForImageClassification",
    "DeiTForImageClassificationWithTeacher",
    "Dinov2ForImageClassification",
    "Dinov2WithRegistersForImageClassification",
)
# The parts of these classes are named after their first word, e.g. ViTAttention and ViTMLP.
WORDS = tuple(dict.fromkeys(name.partition("ForImage")[0] for name in CLASSES))
PREFIX = ("cls_token", "distillation_token", "register_tokens")


def is_transformers_folder(folder: Path | str) -> bool:
    """Returns whether the folder has a config.json written by transformers."""
    path = Path(folder) / "config.json"
    record = read_json(path) if path.is_file() else None
    return isinstance(record, Mapping) and "model_type" in record and "kind" not in record


class HuggingFaceModel(Adopted):
    """An image classifier of transformers with attnrx attention.

    Called with images it returns the logits, as every model here; called with `pixel_values=...` it returns the output
    of transformers, so that it runs in pipelines and trainers of transformers.
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
        optional = {} if labels is None else {"labels": labels}
        return self.source(pixel_values=pixel_values, **optional, **options)

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
        """Returns the logits, without the outputs that attnrx attention does not provide."""
        return self.source(pixel_values=images, output_attentions=False, return_dict=True).logits


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
    """`hf:ID` or `hf:FOLDER`, and any instance of the classes in `CLASSES`."""

    name = "huggingface"
    library = "transformers"
    model_type = HuggingFaceModel
    adapter_type = HuggingFaceAttention
    attention_name, patches_path, norm_path = "attention", "embeddings.patch_embeddings.projection", "layernorm"
    mlp_types = tuple(f"{word}MLP" for word in WORDS)
    classifier_names = ("classifier", "cls_classifier", "distillation_classifier")
    head_names = (
        *classifier_names,
        "vit.layernorm",
        "deit.layernorm",
        "dinov2.layernorm",
        "dinov2_with_registers.layernorm",
    )

    def load(self, source: Path | str, **changes: Any) -> Adopted:
        """Reads a classifier from a local folder, or from the hub by its id, and adopts it in evaluation mode.

        Mean, std and image size come from the image processor in the same folder; without one they are 0.5 and the size
        in the configuration. `changes` override fields of the configuration.
        """
        automatic = _transformers("AutoModelForImageClassification")
        with local_copies_if_unreachable(source) as unreachable:
            try:
                model, report = automatic.from_pretrained(source, output_loading_info=True, **changes)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                reason = f"{unreachable}." if unreachable else error
                raise CheckpointError(
                    f"hf:{source} cannot be read as an image classifier: {reason} Give a folder written by "
                    "save_pretrained, or the id of an image classifier on the hub."
                ) from error
        missing = sorted(map(str, report["missing_keys"])) + sorted(map(str, report["mismatched_keys"]))
        if missing:
            raise CheckpointError(
                f"hf:{source} lacks weights of {type(model).__name__}: {', '.join(missing[:4])} would be random. "
                "Fine-tune it as a classifier first, and save the result."
            )
        return self.adopt(model, **_processor(source, _is_dinov2(model))).eval()

    def preprocessing(self, model: nn.Module) -> Callable[[Any], Tensor] | None:
        """Returns the image processor of transformers that was saved with the model; None where there is none."""
        config: Any = self._adopted(model).source.config
        source = config._name_or_path
        processor = _image_processor(source) if source else None
        if processor is None:
            return None
        return lambda picture: processor(images=picture.convert("RGB"), return_tensors="pt")["pixel_values"][0]

    def initialized(self, name: str, **arguments: Any) -> nn.Module:
        automatic = _transformers("AutoModelForImageClassification")
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
            return automatic.from_config(config)

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields unsupported classes of models or attention, and unsupported features."""
        yield from features(model)
        name = type(model).__name__
        if name not in CLASSES or not self.adopts(model):
            classifies = "ForImageClassification" in name
            lacks = "has no reader" if classifies else "is not an image classifier"
            yield Refusal(f"the class {name} {lacks}", f"Of transformers, attnrx adopts {', '.join(CLASSES)}.")
            return
        config: Any = model.config
        if config.output_attentions:
            yield Refusal("a configuration with output_attentions=True (attnrx attention returns no attention weights)")
        for layer in self.layers(model):
            attention: Any = layer.attention
            if type(attention).__name__ != f"{name.partition('ForImage')[0]}Attention":
                yield Refusal(f"the attention {type(attention).__name__} has no reader")
                continue
            yield from changed_linears(attention, PROJECTIONS)
            if attention.attention_dropout:
                yield Refusal("dropout inside attention (load it with attention_probs_dropout_prob=0.0)")

    def origin(self, model: nn.Module, stated: Mapping[str, Any]) -> Origin:
        """Reads the configuration; mean and std are 0.5, as in ViTImageProcessor, unless stated."""
        name, config = type(model).__name__, model.config
        arguments = json.loads(config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
        arguments.pop("_name_or_path", None)  # the source path is no part of the model
        embedding: Any = self.body(model).get_submodule("embeddings.patch_embeddings")
        own = image_shape((embedding.num_channels, *embedding.image_size))
        shape = image_shape(stated.get("input_shape") or own)
        if shape != own and not (_is_dinov2(model) and shape[0] == own[0]):
            raise InvalidInput(f"{name} takes images of {own}, not of {shape}.")
        half = (0.5,) * own[0]
        return Origin(name, arguments, shape, tuple(stated.get("mean") or half), tuple(stated.get("std") or half))

    def create(self, origin: Origin) -> nn.Module:
        """Creates the class from its configuration."""
        if origin.architecture not in CLASSES:
            raise UnknownName("class of transformers", origin.architecture, CLASSES)
        kind = _transformers(origin.architecture)
        return kind(kind.config_class.from_dict(dict(origin.arguments)))

    def layers(self, source: nn.Module) -> tuple[nn.Module, ...]:
        path = "encoder.layer" if _is_dinov2(source) else "layers"
        return tuple(self.body(source).get_submodule(path).children())

    def body(self, source: nn.Module) -> nn.Module:
        return source.base_model  # type: ignore[return-value]

    def own(self, attention: nn.Module) -> Attention:
        theirs: Any = attention
        linears: list[nn.Linear] = [getattr(theirs, name) for name in PROJECTIONS]
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return assembled(weights, biases, theirs.num_attention_heads, theirs.scaling)

    def class_names(self, model: nn.Module) -> tuple[str, ...]:
        """Returns the labels of the configuration, unless they are the placeholders LABEL_0, LABEL_1, ..."""
        config: Any = self._adopted(model).source.config
        names = tuple(config.id2label[index] for index in sorted(config.id2label))
        return () if all(name == f"LABEL_{index}" for index, name in enumerate(names)) else names

    def norm_before(self, layer: nn.Module) -> str | None:
        """Returns the first norm of ViT and DeiT; not used for DINOv2, which pools all tokens."""
        return "layernorm_before"

    def prefix_tokens(self, source: nn.Module) -> int:
        embeddings = self.body(source).get_submodule("embeddings")
        return sum(token.shape[1] for name, token in embeddings.named_parameters(recurse=False) if name in PREFIX)

    def pooling(self, source: nn.Module) -> str:
        """Returns the pooling; DINOv2 classifies the class token concatenated with the mean of the patches."""
        return "mean" if _is_dinov2(source) else "class"


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


def _is_dinov2(source: nn.Module) -> bool:
    """Returns whether the model is a DINOv2, which accepts images of another size."""
    return type(source).__name__.startswith("Dinov2")


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
