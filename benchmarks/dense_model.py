"""Shrinks a model that predicts maps, exports it, and compares it with the file from the vendor's own converter.

The model is a Vision Transformer with a decoder. It is created by a class that can be imported, e.g.
`saliency:Saliency`, with weights from a safetensors file. The images come from a parquet file. For every image that
`shrink` has not seen, the script correlates the exported file's map with the original's map. The speeds come from the
evidence of `shrink`, which times the files in turns, in one run.

    PYTHONPATH=FOLDER python benchmarks/dense_model.py saliency:Saliency --weights FILE --data PARQUET \\
        --to 'openvino(precision=int8)' --faster 1.4 --out runs/dense
"""

import argparse
import importlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import attnrx as rx
from attnrx.exporting import present_exports
from attnrx.support.preprocessing import IMAGENET
from attnrx.support.storage import write_json


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Normalized pictures from rows of a parquet file, resized to height x width."""

    def __init__(self, rows: Any, size: Sequence[int]):
        self.rows, self.size = rows, (size[1], size[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        picture = Image.open(io.BytesIO(self.rows[row]["image"]["bytes"])).convert("RGB").resize(self.size)
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(each)[:, None, None] for each in IMAGENET)
        return (pixels - mean) / std


def created(name: str, weights: Path) -> nn.Module:
    """Creates the class MODULE:CLASS and loads its weights from a file."""
    module, _, class_name = name.partition(":")
    model = getattr(importlib.import_module(module), class_name)().eval()
    model.load_state_dict({key: value.float() for key, value in load_file(weights).items()}, strict=False)
    return model


def maps_of(model: nn.Module, pictures: Pictures) -> torch.Tensor:
    """Returns the maps of all pictures, [pictures, pixels]."""
    with torch.no_grad():
        return torch.cat([model(batch) for batch in DataLoader(pictures, batch_size=25)]).flatten(1).double()


def correlations(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Returns the correlation between both maps of every image."""
    before, after = (maps - maps.mean(1, keepdim=True) for maps in (before, after))
    return torch.cosine_similarity(before, after)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="MODULE:CLASS, called without arguments")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True, help="a parquet file with a column of encoded images")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("HEIGHT", "WIDTH"))
    targets = parser.add_mutually_exclusive_group(required=True)
    targets.add_argument("--faster", type=float)
    targets.add_argument("--macs", type=float)
    parser.add_argument("--to", help="the format of a file (eager PyTorch)")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, default=500, help="given to shrink, and as many others for the maps")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the result")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    model, rows = created(options.module, options.weights), parquet.read_table(options.data).to_pylist()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    given, held_out = (
        Pictures([rows[index] for index in some], options.size)
        for some in (order[: options.images], order[-options.images :])
    )
    began = time.perf_counter()
    about = {name: getattr(options, name) for name in ("faster", "macs", "batch", "effort", "to")}
    result = rx.shrink(model, DataLoader(given, batch_size=32), log=print, **about)
    seconds = time.perf_counter() - began
    result.save(options.out)
    files = present_exports(options.out)
    original = maps_of(model, held_out)
    smaller = {"model": result.model, **{path.name: rx.load(path) for path in files}}
    found = {name: correlations(original, maps_of(each, held_out)) for name, each in smaller.items()}
    record: dict[str, Any] = {
        "seconds": seconds,
        "mean_correlation": {name: float(each.mean()) for name, each in found.items()},
        "least_correlation": {name: float(each.min()) for name, each in found.items()},
    }
    write_json(options.out / "dense_model.json", record)
    print(result.summary(), record, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
