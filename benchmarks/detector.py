"""Trains a detector with a real DINOv2 on scenes of photographs, and measures how much AP a smaller detector loses.

A scene is a blurred photograph with one to four smaller photographs on it. Each smaller photograph is an object of its
class. The detector is a DINOv2 with a convolutional head. Like CenterNet (Zhou et al., 2019), the head predicts the
centre and the size of every object in the grid of patches. The head is trained on features that are computed only
once. Then `shrink` makes the whole detector faster, with a divergence for detectors. The evidence contains the average
precision (AP) at an overlap of one half (`metric_of_set`), on scenes of photographs that no other step has seen.

    python benchmarks/detector.py --weights dinov2_vits14_saliency.safetensors --data imagenette224.parquet
"""

import argparse
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
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import attnrx as rx
from attnrx.support.preprocessing import IMAGENET
from attnrx.support.storage import write_json

SIDE, PATCH = 224, 14
GRID = SIDE // PATCH
OBJECTS, PEAKS = 4, 20  # the largest number of objects in a scene, and of centres whose scores are used


class Detector(nn.Module):
    """Predicts, for every patch, a centre score per class, and the offset and logarithmic size of a box."""

    def __init__(self, backbone: nn.Module, width: int, classes: int):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential(
            nn.Conv2d(width, 96, 1),
            nn.GELU(),
            nn.Conv2d(96, 96, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(96, classes + 4, 1),
        )
        nn.init.constant_(self.head[-1].bias[:classes], -3.0)  # centres are rare

    def features(self, images: Tensor) -> Tensor:
        """Returns the features of the patches, [batch, width, GRID, GRID]."""
        return self.backbone(images).last_hidden_state[:, 1:].mT.unflatten(2, (GRID, GRID))

    def forward(self, images: Tensor) -> Tensor:
        """Returns the head's predictions, [batch, classes + 4, GRID, GRID]."""
        return self.head(self.features(images))


def backbone_of(weights: Path | None) -> nn.Module:
    """Returns a DINOv2 ViT-S/14 with a file's weights named `backbone.*`, or a small DINOv2 with random weights."""
    from transformers import Dinov2Config, Dinov2Model

    if weights is None:
        small: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        return Dinov2Model(Dinov2Config(**small, patch_size=PATCH, image_size=SIDE)).eval()
    config = Dinov2Config(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, patch_size=PATCH, image_size=518
    )
    model = Dinov2Model(config).eval()
    tensors = {name.removeprefix("backbone."): tensor.float() for name, tensor in load_file(weights).items()}
    model.load_state_dict(
        {name: each for name, each in tensors.items() if not name.startswith("decoder")}, strict=False
    )
    return model


def scenes(pictures: Sequence[tuple[np.ndarray, int]], count: int, seed: int) -> TensorDataset:
    """Returns scenes [count, 3, SIDE, SIDE] and their objects [count, OBJECTS, 5].

    The five numbers of an object are its class, its centre (x, y), its width and its height. Lengths are shares of
    SIDE. An unused row has the class -1.
    """
    random, images, objects = np.random.default_rng(seed), [], torch.full((count, OBJECTS, 5), -1.0)
    for scene in range(count):
        ground, _ = pictures[random.integers(len(pictures))]
        canvas = Image.fromarray(ground).resize((12, 12)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        taken = np.zeros((SIDE, SIDE), dtype=bool)
        for index in range(random.integers(1, OBJECTS + 1)):
            width, height = (int(each) for each in random.integers(56, 120, 2))
            left, top = int(random.integers(SIDE - width)), int(random.integers(SIDE - height))
            if taken[top : top + height, left : left + width].any():
                continue
            taken[top : top + height, left : left + width] = True
            picture, label = pictures[random.integers(len(pictures))]
            canvas.paste(Image.fromarray(picture).resize((width, height)), (left, top))
            box = label, (left + width / 2) / SIDE, (top + height / 2) / SIDE, width / SIDE, height / SIDE
            objects[scene, index] = torch.tensor(box)
        images.append(torch.from_numpy(np.asarray(canvas).copy()))
    pixels = torch.stack(images).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(each)[:, None, None] for each in IMAGENET)
    return TensorDataset((pixels - mean) / std, objects)


def targets_of(objects: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns target scores of centres [batch, classes, GRID, GRID], boxes [batch, 4, GRID, GRID], and the box mask."""
    marks = torch.zeros(len(objects), classes, GRID, GRID)
    boxes, present = torch.zeros(len(objects), 4, GRID, GRID), torch.zeros(len(objects), GRID, GRID, dtype=torch.bool)
    places = torch.arange(GRID) + 0.5
    for scene, index in (objects[..., 0] >= 0).nonzero().tolist():
        label, x, y, width, height = objects[scene, index].tolist()
        across, down = ((places - centre * GRID).square() for centre in (x, y))
        spread = 2 * (0.15 * GRID * max(width, height)) ** 2
        mark = (-(down[:, None] + across) / spread).exp()
        row, column = int(y * GRID), int(x * GRID)
        mark[row, column] = 1.0
        marks[scene, int(label)] = torch.maximum(marks[scene, int(label)], mark)
        logarithms = torch.tensor([width, height]).log()
        boxes[scene, :, row, column] = torch.tensor([x * GRID - column, y * GRID - row, *logarithms.tolist()])
        present[scene, row, column] = True
    return marks, boxes, present


def trained(detector: Detector, data: TensorDataset, epochs: int, classes: int) -> None:
    """Trains the head on features computed once, with CenterNet's focal loss (Eq. 1) and absolute errors."""
    pixels, objects = data.tensors
    with torch.no_grad():
        features = torch.cat([detector.features(part) for part in pixels.split(16)])
    loader = DataLoader(
        TensorDataset(features, *targets_of(objects, classes)), 32, True, generator=torch.Generator().manual_seed(0)
    )
    optimizer = torch.optim.AdamW(detector.head.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs * len(loader))
    for _ in range(epochs):
        for given, marks, boxes, present in loader:
            answers = detector.head(given)
            scores, found = answers[:, :classes], answers[:, classes:]
            share, log_share, log_rest = scores.sigmoid(), F.logsigmoid(scores), F.logsigmoid(-scores)
            right = (1 - share).square() * log_share * (marks == 1)
            wrong = (1 - marks).pow(4) * share.square() * log_rest * (marks < 1)
            number = present.sum().clamp_min(1)
            error = ((found - boxes).abs().sum(1) * present).sum()
            optimizer.zero_grad()
            ((error - (right + wrong).sum()) / number).backward()
            optimizer.step()
            schedule.step()


def boxes_of(answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the PEAKS strongest centres of every scene, starting with the strongest, as class, score and corners."""
    scores, found = answers[:, :-4].sigmoid(), answers[:, -4:]
    peaks = scores * (scores == F.max_pool2d(scores, 3, 1, 1))
    score, place = peaks.flatten(1).topk(PEAKS)
    label, cell = place // GRID**2, place % GRID**2
    x, y, width, height = (each.flatten(1).gather(1, cell) for each in found.unbind(1))
    centre = torch.stack([(cell % GRID + x) / GRID, (cell // GRID + y) / GRID], -1)
    half = torch.stack([width, height], -1).exp() / 2
    return label, score, torch.cat([centre - half, centre + half], -1)


def average_precision(answers: Tensor, objects: Tensor) -> Tensor:
    """Returns the mean over classes of the average precision at an overlap (IoU) of one half."""
    label, score, box = boxes_of(answers.float())
    kind, centre, half = objects[..., 0], objects[..., 1:3].float(), objects[..., 3:].float() / 2
    low, high = centre - half, centre + half
    left = torch.maximum(box[:, :, None, :2], low[:, None])
    shared = (torch.minimum(box[:, :, None, 2:], high[:, None]) - left).clamp_min(0).prod(-1)
    area = (box[..., 2:] - box[..., :2]).prod(-1)[:, :, None] + (high - low).prod(-1)[:, None] - shared
    fits = (shared / area > 0.5) & (label[:, :, None] == kind[:, None])  # [scenes, peaks, objects]
    free, hit = torch.ones_like(kind, dtype=torch.bool), torch.zeros_like(label, dtype=torch.bool)
    for peak in range(label.shape[1]):  # starts with the strongest, because an object can be found only once
        mine = fits[:, peak] & free
        hit[:, peak] = mine.any(1)
        first = F.one_hot(mine.int().argmax(1), kind.shape[1]).bool() & mine
        free &= ~first
    areas = []
    for each in kind[kind >= 0].unique():
        chosen = label == each
        order = score[chosen].argsort(descending=True)
        right = hit[chosen][order].double()
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
        highest = precision.flip(0).cummax(0).values.flip(0)
        areas.append((highest * right).sum() / (kind == each).sum())
    return torch.stack(areas).mean()


def detection_divergence(original: Tensor, smaller: Tensor) -> Tensor:
    """Returns, per scene, the divergence of the scores, plus the change of boxes where the original sees an object."""
    base, share = original[:, :-4], original[:, :-4].sigmoid()
    crossed = [F.binary_cross_entropy_with_logits(each, share, reduction="none") for each in (smaller[:, :-4], base)]
    moved = (original[:, -4:] - smaller[:, -4:]).abs().sum(1) * share.amax(1)
    return (crossed[0] - crossed[1]).sum((1, 2, 3)) + moved.sum((1, 2))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="a safetensors file (a small model of random weights)")
    parser.add_argument("--data", required=True, help="a parquet file with columns image, label and split")
    parser.add_argument("--scenes", type=int, default=1500, help="to train on")
    parser.add_argument("--given", type=int, default=1000, help="of these, to shrink with")
    parser.add_argument("--tested", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=25)
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument("--faster", type=float)
    targets.add_argument("--macs", type=float)
    parser.add_argument("--to", help="the format of a file (eager PyTorch)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--out", type=Path, required=True, help="a folder for detector.json")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    pictures: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "test": []}
    for row in parquet.read_table(options.data).to_pylist():
        picture = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"))
        pictures["train" if row["split"] == "train" else "test"].append((picture, row["label"]))
    classes = 1 + max(label for _, label in pictures["train"])
    learned, tested = scenes(pictures["train"], options.scenes, 0), scenes(pictures["test"], options.tested, 1)
    backbone: Any = backbone_of(options.weights)
    detector, began = Detector(backbone, backbone.config.hidden_size, classes), time.perf_counter()
    trained(detector, learned, options.epochs, classes)
    print(f"trained in {time.perf_counter() - began:.0f} s")
    given = TensorDataset(*(each[: options.given] for each in learned.tensors))
    data = {"train": DataLoader(given, 32), "test": DataLoader(tested, 32)}
    target = {"macs": options.macs} if options.macs else {"faster": options.faster or 1.4}
    about: dict[str, Any] = {"batch": options.batch, "threads": 1, "effort": options.effort, "to": options.to}
    measures: dict[str, Any] = {"divergence": detection_divergence, "metric_of_set": average_precision}
    result = rx.shrink(detector.eval(), data, **target, **about, **measures, log=print)
    found = [finding for finding in result.evidence.findings if finding.check == "metric_of_set"]
    record = {each.claim: [each.value, each.low, each.high] for each in found}
    write_json(options.out / "detector.json", {"summary": result.summary(), "average_precision": record})
    print(result.summary(), *(f"{claim}: {values}" for claim, values in record.items()), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
