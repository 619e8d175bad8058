"""Data that cannot be used: every function refuses them by an error of attnrx, caused by that of the user's code."""

from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import attnrx as rx
from attnrx.support.errors import AttnrxError
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support.time_limits import time_limit

SECONDS = 20


class Items(Dataset[Any]):
    """A dataset whose items are made by a function."""

    def __init__(self, item: Callable[[int], Any], length: Callable[[], Any] = lambda: 12):
        self.item, self.length = item, length

    def __len__(self) -> Any:
        return self.length()

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Stream(IterableDataset[Any]):
    """Batches of which the second cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
        raise OSError("disk gone")


def failing(*_: Any) -> Any:
    raise ZeroDivisionError("of the user")


def late(index: int) -> Any:
    return failing() if index == 7 else (image(index), index % 3)


def image(index: int) -> torch.Tensor:
    return torch.full((3, 16, 16), index / 24)


def batch(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(*(shape or (4, 3, 16, 16)), **options)


# name -> data; those that begin with "user" raise in code of the user.
WRONG: dict[str, Callable[[], Any]] = {
    "user: item": lambda: Items(failing),
    "user: item in the middle": lambda: Items(late),
    "user: length": lambda: Items(image, failing),
    "user: collate": lambda: DataLoader(Items(image), batch_size=4, collate_fn=failing),
    "user: item of a loader": lambda: DataLoader(Items(late), batch_size=4),
    "user: iterable": Stream,
    "user: loader of an iterable": lambda: DataLoader(Stream(), batch_size=None),
    "negative length": lambda: Items(image, lambda: -3),
    "huge length": lambda: Items(failing, lambda: 10**12),
    "sparse": lambda: batch().to_sparse(),
    "meta": lambda: batch(device="meta"),
    "complex": lambda: batch(dtype=torch.complex64),
    "bool": lambda: batch(dtype=torch.bool),
    "bytes as images": lambda: batch(dtype=torch.uint8),
    "float8": lambda: batch().to(torch.float8_e4m3fn),
    "nested": lambda: torch.nested.nested_tensor([batch(3, 16, 16)] * 3),
    "labels of floats": lambda: (batch(), torch.rand(4)),
    "labels too few": lambda: (batch(), torch.zeros(3, dtype=torch.long)),
    "labels of two axes": lambda: (batch(), torch.zeros(4, 2, dtype=torch.long)),
    "other size": lambda: batch(4, 3, 8, 8),
    "one image": lambda: batch(3, 16, 16),
    "NaN": lambda: torch.full((4, 3, 16, 16), float("nan")),
    "infinity": lambda: torch.full((4, 3, 16, 16), float("inf")),
    "no image": lambda: batch(0, 3, 16, 16),
    "items of None": lambda: Items(lambda index: None),
    "items of numbers": lambda: Items(lambda index: index),
    "items of texts": lambda: Items(lambda index: "a"),
    "items without an image": lambda: Items(lambda index: {"a": 1}),
    "empty items": lambda: Items(lambda index: ()),
    "nested items": lambda: Items(lambda index: ((image(index),), 1)),
    "names as labels": lambda: Items(lambda index: (image(index), "cat")),
    "objects as labels": lambda: Items(lambda index: (image(index), object())),
    "images of two sizes": lambda: Items(lambda index: batch(3, 16, 16 + index % 2)),
    "list of None": lambda: [None, None],
    "list of lists": lambda: [[1, 2], [3]],
    "empty list": list,
    "number": lambda: 3,
    "function": lambda: failing,
    "class": lambda: dict,
    "module": lambda: nn.Linear(2, 2),
    "array of objects": lambda: np.array([None] * 4),
    "array of texts": lambda: np.array(["a"] * 4),
}
VERBS: dict[str, Callable[[nn.Module, Any], object]] = {
    "diagnose": rx.diagnose,
    "verify": lambda model, data: rx.verify(model, model, data),
    "repair": lambda model, data: rx.repair(model, model, data),
    "distill": lambda model, data: rx.distill(model, model, data),
    "shrink": lambda model, data: rx.shrink(model, data, macs=0.5),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "verb", [pytest.param(name, marks=() if name == "diagnose" else pytest.mark.slow) for name in VERBS]
)
def test_wrong_data_are_refused(verb: str) -> None:
    config = ViTConfig.uniform(
        "dense", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
    )
    model = initialize_(VisionTransformer(config), seed=0).float().eval()
    torch.set_default_dtype(torch.float32)
    jaxtyping.config.update("jaxtyping_disable", True)  # as for a user
    found = list[str]()
    try:
        for name, make in WRONG.items():
            data = make()
            try:
                with time_limit(SECONDS):
                    VERBS[verb](model, data)
            except AttnrxError as error:
                causes = str(error), str(error.__cause__), str(getattr(error.__cause__, "__cause__", None))
                if name.startswith("user") and not any("of the user" in one or "disk gone" in one for one in causes):
                    found.append(f"{name}: without the user's exception: {error}"[:300])
            except Exception as error:
                found.append(f"{name}: {type(error).__name__}: {error}"[:300])
            else:
                found.append(f"{name}: accepted")
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert not found, f"{len(found)} of {len(WRONG)}:\n" + "\n".join(found)
