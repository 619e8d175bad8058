"""Several tensors in tuples, lists, mappings and the output classes of libraries, as a module may return them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attnrx.support.shapes import Float, Tensor


def mapped(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns the tree with `function(tensor, ...)` in the place of every tensor; other values stay.

    Args:
        function: Receives a tensor of the tree and those of the others in the same place.
        tree: Tensors in tuples, lists and mappings.
        *others: Trees of the same structure.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        items = {key: mapped(function, value, *(other[key] for other in others)) for key, value in tree.items()}
        # The output classes of transformers are dataclasses, which take their fields as keywords.
        return type(tree)(items) if type(tree) is dict else type(tree)(**items)
    if isinstance(tree, tuple | list):
        values = [mapped(function, *each) for each in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_of(tree: Any, name: str = "") -> dict[str, Tensor]:
    """Returns the tensors of floating-point numbers in a tree by their place in it, e.g. `depth` or `heads.0`."""
    if isinstance(tree, Tensor):
        return {name: tree} if tree.is_floating_point() else {}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, tuple | list) else ()
    return {
        place: tensor for key, value in items for place, tensor in tensors_of(value, f"{name}.{key}".strip(".")).items()
    }


def joined(trees: Sequence[Any]) -> Any:
    """Returns the tree of all images from those of the parts of a batch."""
    return mapped(lambda *parts: torch.cat(parts), trees[0], *trees[1:])


def from_rows(rows: Float[Tensor, "images numbers"], template: Any) -> Any:
    """Returns the tree whose numbers `rows_of` put into rows; the template is the tree of one image."""
    sizes = [tensor[0].numel() for tensor in tensors_of(template).values()]
    parts = iter(rows.split(sizes, dim=1))
    return mapped(
        lambda tensor: next(parts).reshape(-1, *tensor.shape[1:]) if tensor.is_floating_point() else tensor, template
    )


def rows_of(tree: Any) -> Float[Tensor, "images numbers"]:
    """Returns all numbers of every image in one row; an output of one row per image is returned as it is."""
    if isinstance(tree, Tensor) and tree.ndim == 2:
        return tree
    # Not flattened: a tensor may have one number per image.
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in tensors_of(tree).values()], dim=1)
