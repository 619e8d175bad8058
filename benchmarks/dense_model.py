"""`attnrx.shrink` on a whole model of maps (a Vision Transformer with a decoder), compared on images held out from all.

The module is created by a class that can be imported, e.g. `saliency:Saliency`, with weights in a safetensors file;
images are those of a parquet file. Half of the reported errors would hide in a few maps, so that the correlation is
a mean over images, with the least one beside it. The files of ONNX and OpenVINO are compared with the result.

PYTHONPATH=FOLDER python benchmarks/dense_model.py saliency:Saliency --weights FILE --data PARQUET --out runs/dense
"""

import argparse
import importlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import attnrx as rx
from attnrx.change.exporting import load_exported
from attnrx.support.storage import write_json

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Pictures(torch.utils.data.Dataset[torch.Tensor]):
    """Normalized pictures of some rows of a parquet file, resized to height x width."""

    def __init__(self, rows: Any, size: tuple[int, int]):
        self.rows, self.size = rows, size

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        encoded = self.rows[row]["image"]
        picture = Image.open(io.BytesIO(encoded["bytes"])).convert("RGB").resize(self.size[::-1])
        pixels = torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def created(name: str, weights: Path) -> nn.Module:
    module, _, class_name = name.partition(":")
    model = getattr(importlib.import_module(module), class_name)().eval()
    model.load_state_dict({key: value.float() for key, value in load_file(weights).items()}, strict=False)
    return model


def maps_of(model: Any, pictures: Pictures) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in torch.utils.data.DataLoader(pictures, batch_size=25)]).flatten(1)


def errors(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Returns the mean and the least correlation of two maps of an image, and the mean absolute error."""
    before, after = before.double(), after.double()
    centred = [maps - maps.mean(1, keepdim=True) for maps in (before, after)]
    norms = centred[0].norm(dim=1) * centred[1].norm(dim=1)
    correlation = (centred[0] * centred[1]).sum(1) / norms.clamp_min(1e-12)
    mean_absolute = float((before - after).abs().mean())
    return {
        "correlation": float(correlation.mean()),
        "least_correlation": float(correlation.min()),
        "mean_absolute_error": mean_absolute,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="MODULE:CLASS, called without arguments")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", required=True, help="a parquet file with a column of encoded images")
    parser.add_argument("--size", type=int, nargs=2, default=(224, 224), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--faster", type=float, default=1.5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--images", type=int, default=500, help="given to shrink, and as many others for the errors")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--openvino", action="store_true", help="write and compare an OpenVINO file too")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the result")
    options = parser.parse_args(argv)
    import pyarrow.parquet as parquet

    torch.set_num_threads(1)
    model, rows = created(options.module, options.weights), parquet.read_table(options.data).to_pylist()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    given, held_out = (
        Pictures([rows[index] for index in some], (options.size[0], options.size[1]))
        for some in (order[: options.images], order[-options.images :])
    )
    began = time.perf_counter(), time.process_time()
    loader = torch.utils.data.DataLoader(given, batch_size=32)
    result = rx.shrink(model, loader, faster=options.faster, batch=options.batch, effort=options.effort, log=print)
    seconds = {"seconds": time.perf_counter() - began[0], "cpu_seconds": time.process_time() - began[1]}
    expected, found = maps_of(model, held_out), maps_of(result.model, held_out)
    record: dict[str, Any] = {"summary": result.summary(), **seconds, **errors(expected, found)}
    result.save(options.out)  # with its report and its ONNX file
    few = torch.stack([held_out[index] for index in range(8)])
    files = {"onnx": load_exported(options.out / "model.onnx")}
    if options.openvino:
        files["openvino"] = rx.export(result.model, options.out / "model.xml", "openvino")
    with torch.no_grad():
        base = result.model(few)
        record["files"] = {name: float((file(few) - base).abs().max()) for name, file in files.items()}
    write_json(options.out / "dense_model.json", record)
    for name, value in record.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
