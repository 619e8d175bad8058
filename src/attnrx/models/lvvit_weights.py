"""Maps the published weights of LV-ViT from the parameter names of its authors' code to those of attnrx."""

from collections.abc import Mapping
from pathlib import Path

from attnrx.errors import CheckpointError
from attnrx.models.lvvit import LVViT
from attnrx.models.timm_family import read_checkpoint
from attnrx.serialization.storage import read_tensors, require_finite_tensors
from attnrx.shapes import Tensor

# Published name -> attnrx name; {} is a layer index. A published tensor with several attnrx names is split by rows.
WHOLE = {"cls_token": "class_token", "pos_embed": "positions"}
PARTS = {
    "patch_embed.proj": "stem.projection",
    "norm": "norm",
    "head": "classifier",
    "aux_head": "patch_classifier",
    **{f"patch_embed.conv{number}": f"stem.convolutions.{number - 1}" for number in (1, 2, 3)},
    **{f"patch_embed.bn{number}": f"stem.norms.{number - 1}" for number in (1, 2, 3)},
}
LAYER_PARTS = {
    "blocks.{}.norm1": ("layers.{}.attention_norm",),
    "blocks.{}.norm2": ("layers.{}.mlp_norm",),
    "blocks.{}.attn.qkv": tuple(f"layers.{{}}.attention.{part}" for part in ("scores.query", "scores.key", "value")),
    "blocks.{}.attn.proj": ("layers.{}.attention.output",),
    "blocks.{}.mlp.fc1": ("layers.{}.mlp.0",),
    "blocks.{}.mlp.fc2": ("layers.{}.mlp.2",),
}


def read_published(path: Path, model: LVViT, name: str) -> dict[str, Tensor]:
    """Reads a file with the published names and returns its tensors under the names of attnrx.

    Raises:
        CheckpointError: The file cannot be read, or a tensor is missing, unknown, of another shape or not finite.
    """
    tensors = read_tensors(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    require_finite_tensors(tensors, str(path))
    return renamed(tensors, model, f"the weights in {path} do not fit {name}")


def renamed(tensors: Mapping[str, Tensor], model: LVViT, problem: str) -> dict[str, Tensor]:
    """Returns published tensors under the names of attnrx; every tensor on either side must have a counterpart."""
    ours, names = model.state_dict(), published_names(model)
    missing, unknown = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or unknown:
        raise CheckpointError(f"{problem}: missing are {_listed(missing)}; not known are {_listed(unknown)}.")
    found: dict[str, Tensor] = {}
    for theirs, targets in names.items():
        expected = [ours[target] for target in targets]
        shape = (sum(tensor.shape[0] for tensor in expected), *expected[0].shape[1:]) if expected[0].ndim else ()
        tensor = tensors[theirs]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{problem}: {theirs} has the shape {tuple(tensor.shape)}, and {shape} is wanted.")
        split = tensor.split([len(part) for part in expected]) if len(targets) > 1 else (tensor,)
        # Cloned, because the slices of a fused projection share one storage.
        found |= {target: part.clone() for target, part in zip(targets, split, strict=True)}
    return found


def published_names(model: LVViT) -> dict[str, tuple[str, ...]]:
    """Returns, for every published tensor, the names of the attnrx parameters that it holds."""
    ours = model.state_dict().keys()
    modules = {theirs: (own,) for theirs, own in PARTS.items()}
    for layer in range(model.config.depth):
        for theirs, targets in LAYER_PARTS.items():
            modules[theirs.format(layer)] = tuple(target.format(layer) for target in targets)
    names: dict[str, tuple[str, ...]] = {theirs: (own,) for theirs, own in WHOLE.items()}
    for theirs, targets in modules.items():
        for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{targets[0]}.{kind}" in ours:
                names[f"{theirs}.{kind}"] = tuple(f"{target}.{kind}" for target in targets)
    return names


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "none"
