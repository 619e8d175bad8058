"""`attnrx.shrink` on a segmenter: a frozen Vision Transformer of timm with a head for patches, judged by its mean IoU.

The head is trained here on mosaics of 2 x 2 images, whose patches have the class of their image. Another half of the
images makes the mosaics that the smaller model is planned, fitted and verified on; divergence and metric are those of
docs/how-to/segmentation.py.

python benchmarks/segmentation_head.py --weights FILE --data imagenette224.parquet --out runs/segmenter
"""

import argparse
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

import attnrx as rx
from attnrx.support.storage import write_json

SIZE, GRID, CLASSES = 224, 14, 10


class Mosaics(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Normalized mosaics of 2 x 2 pictures, and the class of every patch, [14, 14]."""

    def __init__(self, rows: Sequence[Any], count: int, mean: Sequence[float], std: Sequence[float], seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.chosen = rows, torch.randint(len(rows), (count, 2, 2), generator=generator)
        self.mean, self.std = (torch.tensor(each)[:, None, None] for each in (mean, std))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, mask = torch.zeros(3, SIZE, SIZE), torch.zeros(GRID, GRID, dtype=torch.long)
        side, patches = SIZE // 2, GRID // 2
        for y in range(2):
            for x in range(2):
                row = self.rows[int(self.chosen[index, y, x])]
                part = Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB").resize((side, side))
                pixels = torch.from_numpy(np.asarray(part).copy()).permute(2, 0, 1).float() / 255
                picture[:, y * side : (y + 1) * side, x * side : (x + 1) * side] = pixels
                mask[y * patches : (y + 1) * patches, x * patches : (x + 1) * patches] = row["label"]
        return (picture - self.mean) / self.std, mask


class Segmenter(nn.Module):
    """A Vision Transformer of timm and convolutions over its patches; returns logits [batch, classes, 14, 14]."""

    def __init__(self, weights: str | None = None):
        super().__init__()
        overlay = {} if weights is None else {"pretrained": True, "pretrained_cfg_overlay": {"file": weights}}
        self.backbone = timm.create_model("vit_tiny_patch16_224", **overlay)
        self.head = nn.Sequential(
            nn.Conv2d(self.backbone.embed_dim, 128, 3, padding=1), nn.ReLU(),
            nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, CLASSES, 1),
        )  # fmt: skip

    def features(self, images: torch.Tensor) -> torch.Tensor:
        return self.backbone.forward_features(images)[:, 1:].transpose(1, 2).unflatten(2, (GRID, GRID))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


def patch_divergence(original: torch.Tensor, smaller: torch.Tensor) -> torch.Tensor:
    """Returns the KL divergence of the classes of a patch, mean over the patches of every image."""
    old, new = original.log_softmax(1), smaller.log_softmax(1)
    return (old.exp() * (old - new)).sum(1).mean((1, 2))


def mean_iou(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Returns the intersection over union of every image, mean over the classes that it has or is given."""
    _, masks = batch
    found = nn.functional.one_hot(outputs.argmax(1), CLASSES).bool()
    true = nn.functional.one_hot(masks, CLASSES).bool()
    shared, either = (found & true).sum((1, 2)), (found | true).sum((1, 2))
    return (shared / either.clamp_min(1)).sum(1) / (either > 0).sum(1)


def train_head_(model: Segmenter, mosaics: Mosaics, epochs: int) -> None:
    """Fits the head on the features of the frozen Vision Transformer, which are computed once."""
    with torch.no_grad():
        batches = [(model.features(images), masks) for images, masks in DataLoader(mosaics, batch_size=32)]
    optimizer = torch.optim.AdamW(model.head.parameters(), 1e-3)
    for _ in range(epochs):
        for features, masks in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.head(features), masks).backward()
            optimizer.step()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", help="a safetensors file of timm's vit_tiny_patch16_224 (random)")
    parser.add_argument("--data", required=True, help="a parquet file with encoded images and labels of ten classes")
    parser.add_argument("--macs", type=float, default=0.6)
    parser.add_argument("--mosaics", type=int, default=1500, help="to train on, and as many to shrink and verify on")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    import pyarrow.parquet as parquet

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = parquet.read_table(options.data).to_pylist()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    model = Segmenter(options.weights).eval()
    scale = model.backbone.pretrained_cfg["mean"], model.backbone.pretrained_cfg["std"]
    training, data = (
        Mosaics([rows[index] for index in half], options.mosaics, *scale, seed)
        for seed, half in enumerate((order[: len(rows) // 2], order[len(rows) // 2 :]))
    )
    train_head_(model, training, 20)
    began = time.perf_counter(), time.process_time()
    small = rx.shrink(
        model,
        DataLoader(data, batch_size=32),
        macs=options.macs,
        effort=options.effort,
        divergence=patch_divergence,
        metric=mean_iou,
        log=print,
    )
    seconds = {"seconds": time.perf_counter() - began[0], "cpu_seconds": time.process_time() - began[1]}
    record: dict[str, Any] = {"summary": small.summary(), **seconds}
    for finding in small.evidence.findings:
        if finding.check == "metric":
            record[finding.claim] = [finding.value, finding.low, finding.high]
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "segmentation_head.json", record)
    for name, value in record.items():
        print(f"{name}: {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
