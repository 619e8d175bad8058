"""The published weights of LV-ViT: from the names of its authors' code to ours, one tensor for one tensor."""

from collections.abc import Mapping
from pathlib import Path

from attnrx.errors import CheckpointError
from attnrx.models.lvvit import LVViT
from attnrx.models.timm_family import read_checkpoint
from attnrx.shapes import Tensor
from attnrx.storage import read_tensors, require_finite

# Ours by theirs; {} is the number of a layer. A tensor of theirs that holds several of ours is split along its rows.
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
    """Reads a file with the published names, and returns its tensors under ours; the model says which, and what shapes.

    Raises:
        CheckpointError: The file cannot be read, or a tensor is missing, unknown, of another shape or not finite.
    """
    tensors = read_tensors(path) if path.suffix == ".safetensors" else read_checkpoint(path)
    require_finite(tensors, str(path))
    return renamed(tensors, model, f"the weights in {path} do not fit {name}")


def renamed(tensors: Mapping[str, Tensor], model: LVViT, problem: str) -> dict[str, Tensor]:
    """Returns published tensors under our names: every one of them, and for every one of ours."""
    ours, names = model.state_dict(), published_names(model)
    missing, unknown = sorted(names.keys() - tensors.keys()), sorted(tensors.keys() - names.keys())
    if missing or unknown:
        raise CheckpointError(f"{problem}: missing are {_listed(missing)}; not known are {_listed(unknown)}.")
    found: dict[str, Tensor] = {}
    for theirs, parts in names.items():
        wanted = [ours[part] for part in parts]
        shape = (sum(part.shape[0] for part in wanted), *wanted[0].shape[1:]) if wanted[0].ndim else ()
        given = tensors[theirs]
        if tuple(given.shape) != shape:
            raise CheckpointError(f"{problem}: {theirs} has the shape {tuple(given.shape)}, and {shape} is wanted.")
        split = given.split([len(part) for part in wanted]) if len(parts) > 1 else (given,)
        # Copies, because the parts of a fused projection would share one storage.
        found |= {part: own.clone() for part, own in zip(parts, split, strict=True)}
    return found


def published_names(model: LVViT) -> dict[str, tuple[str, ...]]:
    """Gives, for every tensor of the published model of this shape, the names of ours that it holds."""
    ours = model.state_dict().keys()
    modules = {theirs: (own,) for theirs, own in PARTS.items()}
    for layer in range(model.config.depth):
        for theirs, parts in LAYER_PARTS.items():
            modules[theirs.format(layer)] = tuple(part.format(layer) for part in parts)
    names: dict[str, tuple[str, ...]] = {theirs: (own,) for theirs, own in WHOLE.items()}
    for theirs, parts in modules.items():
        for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            if f"{parts[0]}.{kind}" in ours:
                names[f"{theirs}.{kind}"] = tuple(f"{part}.{kind}" for part in parts)
    return names


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{more}" if names else "none"
