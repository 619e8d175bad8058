"""The family of torchvision's VisionTransformer."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from attnrx.support.errors import NotSupported, UnknownName
from attnrx.support.optional import required_module
from attnrx.support.preprocessing import ImageGeometry
from attnrx.vit.models.adopted import Adopted, Origin, image_shape
from attnrx.vit.models.adopted_family import creating
from attnrx.vit.models.reader import Reader, ReaderFamily
from attnrx.vit.models.unsupported_features import Refusal, without_reader

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
# The arguments of VisionTransformer that the model stores as attributes; the other three are those of its blocks.
ARGUMENTS = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "num_classes", "representation_size")


class TorchvisionModel(Adopted):
    """A Vision Transformer of torchvision with attnrx attention."""


class TorchvisionFamily(ReaderFamily):
    """`torchvision:NAME`, e.g. `torchvision:vit_b_16`, and any VisionTransformer of torchvision."""

    name = library = "torchvision"
    model_type = TorchvisionModel
    takes_weights = True

    def reader(self, source: nn.Module) -> Reader:
        size: Any = source.image_size  # torchvision's models take square images of three channels only
        return Reader(
            input_shape=(3, size, size),
            blocks="encoder.layers",
            attention="self_attention",
            norm_before="ln_1",
            maps=("0", "3"),
            patches="conv_proj",
            norm="encoder.ln",
            head="heads",
            mean=MEAN,
            std=STD,
        )

    def has(self, name: str) -> bool:
        models = _torchvision("models")
        return name in models.list_models(module=models)

    def initialized(self, name: str, *, pretrained: bool = False, **arguments: Any) -> nn.Module:
        models = _torchvision("models")
        if not self.has(name):
            raise UnknownName("torchvision model", name, models.list_models(module=models))
        with creating("torchvision", name, arguments, pretrained):
            return models.get_model(name, weights="DEFAULT" if pretrained else None, **arguments)

    def input_format(self, name: str) -> dict[str, Any]:
        transform = _torchvision("models").get_model_weights(name).DEFAULT.transforms()
        settings = {"resize_size": transform.resize_size[0], "interpolation": transform.interpolation.value}
        return {"mean": tuple(transform.mean), "std": tuple(transform.std), "preprocessing": settings}

    def geometry(self, model: nn.Module) -> ImageGeometry:
        """Returns what the transform of the weights does; of other weights that of most of torchvision's presets."""
        channels, size, _ = self.input_shape(model)
        # 224 of 256 pixels, the ratio of crop and resize in torchvision's presets.
        settings = {"resize_size": size * 256 // 224, "interpolation": "bilinear"} | dict(
            self._adopted(model).origin.preprocessing
        )
        target = settings["resize_size"]
        return ImageGeometry((size, size), channels, "shortest_edge", (target, target), settings["interpolation"])

    def refusals(self, model: nn.Module) -> Iterator[Refusal]:
        """Yields other classes than VisionTransformer, and what its reader does not find."""
        name = type(model).__name__
        if name != "VisionTransformer":
            yield Refusal(without_reader(model), "Of torchvision, attnrx adopts VisionTransformer.")
            return
        yield from super().refusals(model)

    def origin(self, model: nn.Module) -> Origin:
        """Reads the arguments of the class from the model; mean and std are those of ImageNet."""
        reader, stored = self.reader(model), {name: getattr(model, name) for name in ARGUMENTS}
        blocks: Any = self.blocks(model)
        arguments = {**stored, "num_layers": len(blocks), "num_heads": blocks[0].num_heads, "attention_dropout": 0.0}
        return Origin("VisionTransformer", arguments, image_shape(reader.input_shape), MEAN, STD)

    def _resized(self, adopted: Adopted, height: int, width: int) -> Origin:
        source: Any = adopted.source
        if height != width:
            raise NotSupported(f"torchvision's VisionTransformer takes square images only, not {height} x {width}.")
        interpolate = _torchvision("models.vision_transformer").interpolate_embeddings
        name, before = "encoder.pos_embedding", source.encoder.pos_embedding
        resized = interpolate(height, source.patch_size, {name: before.detach()})[name].contiguous()
        source.encoder.pos_embedding = nn.Parameter(resized, requires_grad=before.requires_grad)
        settings, size_before = dict(adopted.origin.preprocessing), source.image_size
        source.image_size, source.seq_length = height, resized.shape[1]
        if "resize_size" in settings:
            settings["resize_size"] = math.ceil(settings["resize_size"] * height / size_before)
        arguments = {**adopted.origin.arguments, "image_size": height}
        return replace(adopted.origin, arguments=arguments, preprocessing=settings)

    def create(self, architecture: str, arguments: Mapping[str, Any]) -> nn.Module:
        if architecture == "VisionTransformer":
            return _torchvision("models").VisionTransformer(**arguments)
        return self.initialized(architecture, **arguments)


def _torchvision(module: str) -> Any:
    return required_module(f"torchvision.{module}", "", "a model of torchvision", "torchvision")
