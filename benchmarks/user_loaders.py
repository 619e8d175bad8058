"""`attnrx.shrink` on the kinds of data that people bring: loaders with random crops, samplers, iterables, paths.

Every case shrinks the same model on training images of one parquet file, which its data give in another way, and
measures the top-1 accuracy on clean held-out images by a loop of its own. The cases that are in the JSON file already
are not run again.

python benchmarks/user_loaders.py --weights FILE --data imagenette224.parquet --out runs/user_loaders.json
"""

import argparse
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, WeightedRandomSampler
from torchvision import transforms

import attnrx as rx

MODEL = "vit_tiny_patch16_224"
SCALE = transforms.Normalize((0.5,) * 3, (0.5,) * 3)  # of this model
CLEAN = transforms.Compose([transforms.ToTensor(), SCALE])
TRAINING = transforms.Compose(
    [transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), transforms.ToTensor(), SCALE]
)
BATCH = 32


class Pictures(Dataset[Any]):
    """Pictures of a file with their ImageNet classes, through a transform."""

    def __init__(self, rows: Any, transform: Callable[[Any], torch.Tensor]):
        self.rows, self.transform = rows, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        item = self.rows[int(row)]
        picture = Image.open(io.BytesIO(item["image"]["bytes"])).convert("RGB")
        return self.transform(picture), item["imagenet1k_label"]


class Shuffled(IterableDataset[Any]):
    """An iterable that yields the same pictures in another order every time."""

    def __init__(self, pictures: Pictures):
        self.pictures, self.generator = pictures, np.random.default_rng(0)

    def __iter__(self) -> Iterator[Any]:
        for row in self.generator.permutation(len(self.pictures)):
            yield self.pictures[row]


def folder_of(rows: Any, root: Path) -> Path:
    """Writes the pictures to a folder per class."""
    for number in range(len(rows)):
        item = rows[number]
        path = root / "train" / item["wnid"] / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item["image"]["bytes"])
    return root


def cases(rows: Any, count: int, root: Path) -> dict[str, Callable[[], Any]]:
    """Returns the data of every case, which hold about `count` different pictures."""
    few = rows.select(range(count))
    clean, random = Pictures(few, CLEAN), Pictures(few, TRAINING)
    every = Pictures(rows, CLEAN)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(rows), generator=generator)[:count].tolist()
    weights = torch.rand(len(rows), generator=generator).tolist()
    return {
        "clean loader": lambda: DataLoader(clean, BATCH),
        "random crops, shuffle=True": lambda: DataLoader(random, BATCH, shuffle=True),
        "WeightedRandomSampler": lambda: DataLoader(every, BATCH, sampler=WeightedRandomSampler(weights, count)),
        "SubsetRandomSampler": lambda: DataLoader(every, BATCH, sampler=SubsetRandomSampler(chosen)),
        "iterable that shuffles": lambda: DataLoader(Shuffled(clean), BATCH),
        "folder of pictures": lambda: folder_of(few, root),
    }


def top1(model: torch.nn.Module, held_out: Pictures) -> float:
    """Returns the share of the held-out images that are classified as labelled, in %."""
    right = []
    with torch.inference_mode():
        for images, labels in DataLoader(held_out, 50):
            right.append(model(images).argmax(-1) == labels)
    return 100 * torch.cat(right).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True, help=f"the safetensors file of {MODEL}")
    parser.add_argument("--data", required=True, help="imagenette224.parquet, whose rows of ILSVRC-val are held out")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file, and the place of a folder of pictures")
    parser.add_argument("--images", type=int, default=1024, help="the number of pictures of a case")
    parser.add_argument("--macs", type=float, default=0.6)
    parser.add_argument("--effort", default="quick")
    arguments = parser.parse_args()
    rows = datasets.load_dataset("parquet", data_files=arguments.data, split="train")
    rows = rows.cast_column("image", datasets.Image(decode=False))
    splits, is_held_out = rows["split"], rows["ilsvrc_val"]
    held_out = Pictures(rows.select([row for row, held in enumerate(is_held_out) if held]), CLEAN)
    training = rows.select([row for row, split in enumerate(splits) if split == "train" and not is_held_out[row]])
    original = timm.create_model(MODEL).eval()
    original.load_state_dict(load_file(arguments.weights))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    results.setdefault("original", {"top1": top1(original, held_out)})
    for name, make in cases(training, arguments.images, arguments.out.with_suffix("")).items():
        if name in results:
            continue
        started = time.monotonic()
        found = rx.shrink(original, make(), macs=arguments.macs, effort=arguments.effort, log=print)
        assert found.images is not None
        results[name] = {
            "top1": top1(found.model, held_out),
            "images": [len(part) for part in found.images],
            "notes": list(found.images.notes),
            "summary": found.summary(),
            "seconds": round(time.monotonic() - started),
        }
        arguments.out.write_text(json.dumps(results, indent=1))
    print(
        f"| data | top-1 of {len(held_out)} held-out images, % | minus clean loader | planned / predicted / verified |"
    )
    print("|---|---|---|---|")
    clean = results["clean loader"]["top1"]
    for name, found in results.items():
        parts = " / ".join(map(str, found.get("images", ()))) or "-"
        print(f"| {name} | {found['top1']:.1f} | {found['top1'] - clean:+.1f} | {parts} |")


if __name__ == "__main__":
    main()
