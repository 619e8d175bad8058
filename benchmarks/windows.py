"""Measures how much faster models that attend within windows become: RF-DETR, and the image encoder of SAM.

    OMP_NUM_THREADS=1 python benchmarks/windows.py sam --data imagenette224.parquet --out runs/sam
    OMP_NUM_THREADS=1 python benchmarks/windows.py rf-detr --data imagenette224.parquet --to onnx --faster 1.4 \
        --out runs/rf-detr

The models have the sizes of SAM ViT-B and of RF-DETR nano, and random weights, so nothing is known about accuracy. The
images are photographs. The output of the smaller model is compared with the original's on photographs that no other
step has seen: its cosine for SAM, and what the evidence contains for both. The folder --out gets the smaller model and
a JSON file.
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import normalize, pil_to_tensor

import attnrx as rx
from attnrx.show.checks.statistics import mean_estimate
from attnrx.support.modules import tensors_of
from attnrx.support.preprocessing import IMAGENET
from attnrx.support.storage import write_json
from attnrx.vit.costs.measured import interleave, ratio_of

NOISE = 0.02  # is added to random weights, because transformers starts position embeddings at zero
SIDES = {"sam": 448, "rf-detr": 384}  # of images, in pixels
BATCH = 4
ROUNDS = 10


def sam(**sizes: Any) -> nn.Module:
    """Returns the image encoder of SAM ViT-B with random weights. `sizes` are arguments of its configuration."""
    from transformers import SamVisionConfig, SamVisionModel

    return SamVisionModel(SamVisionConfig(**sizes))


def rf_detr(image_size: int, **sizes: Any) -> nn.Module:
    """Returns an RF-DETR nano with random weights.

    Its blocks attend within 2 x 2 windows, except those whose features the decoder reads.
    """
    from transformers import RfDetrConfig, RfDetrDinov2Config, RfDetrForObjectDetection

    backbone = RfDetrDinov2Config(image_size=image_size, patch_size=16, num_windows=2)
    config = RfDetrConfig(backbone_config=backbone, **{"decoder_layers": 2, "group_detr": 1, **sizes})
    return RfDetrForObjectDetection(config)


MODELS = {"sam": sam, "rf-detr": rf_detr}


def shaken(model: nn.Module) -> nn.Module:
    """Adds noise to all weights, in place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(NOISE * torch.randn(weight.shape, generator=generator))
    return model.eval()


def photographs(data: str, count: int, side: int) -> Tensor:
    """Returns photographs from a parquet file with a column `image`, [count, 3, side, side], in a random order."""
    rows = parquet.read_table(data, columns=["image"]).to_pylist()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
    images = [Image.open(io.BytesIO(rows[row]["image"]["bytes"])).convert("RGB") for row in order.tolist()]
    pixels = [pil_to_tensor(image.resize((side, side))).float() / 255 for image in images]
    return normalize(torch.stack(pixels), list(IMAGENET[0]), list(IMAGENET[1]))


def cosines(model: nn.Module, other: nn.Module, images: Tensor) -> Tensor:
    """Returns the cosine between the first outputs of two models, for every image."""
    found = []
    with torch.no_grad():
        for part in images.split(BATCH):
            sides = [next(iter(tensors_of(each(part)).values())).flatten(1).double() for each in (model, other)]
            found.append(torch.cosine_similarity(sides[0], sides[1]))
    return torch.cat(found)


def faster(model: nn.Module, small: nn.Module, images: Tensor, threads: int) -> str:
    """Returns how many times as fast a smaller model is in attnrx's kernels as the original in its library's code."""
    torch.set_num_threads(threads)
    fast = rx.accelerate(small)
    with torch.inference_mode():
        runs = {"original": lambda: model(images), "smaller": lambda: fast(images)}
        seconds = interleave(runs, rounds=ROUNDS, warmup=1)
    return ratio_of(seconds["original"], seconds["smaller"]).text(2)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--data", required=True, help="a parquet file with a column image")
    parser.add_argument("--side", type=int, help="of the images, in pixels (448 for SAM, 384 for RF-DETR)")
    parser.add_argument("--sizes", nargs="*", default=[], metavar="NAME=N", help="of another SAM, e.g. mlp_dim=96")
    parser.add_argument("--given", type=int, default=96, help="images to shrink with")
    parser.add_argument("--tested", type=int, default=48, help="images to verify on")
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument("--faster", type=float)
    targets.add_argument("--macs", type=float)
    targets.add_argument("--policy", help="merges tokens by this policy and changes nothing else, e.g. ward:0.6@2")
    parser.add_argument("--to", help="the format of a file (eager PyTorch)")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.manual_seed(0)
    side = options.side or SIDES[options.model]
    sizes: dict[str, Any] = {name: int(value) for name, _, value in (each.partition("=") for each in options.sizes)}
    model = rx.load(shaken(MODELS[options.model](image_size=side, **sizes)))
    images = photographs(options.data, options.given + options.tested, side)
    given, tested = images[: options.given], images[options.given :]
    how: dict[str, Any] = {"batch": 1, "threads": options.threads, "effort": options.effort, "to": options.to}
    if options.policy:
        small = rx.realize(model, rx.prescribe(model, f"tokens={options.policy}"))
        record = {"tokens": options.policy, "faster": faster(model, small, tested[:1], options.threads)}
    else:
        target = {"macs": options.macs} if options.macs else {"faster": options.faster or 1.3}
        result = rx.shrink(model, {"train": given, "test": tested}, **target, **how, log=print)
        result.save(options.out)
        small, tokens = result.model, None if result.prescription is None else result.prescription.tokens
        record = {"tokens": "kept" if tokens is None else str(tokens.policy), "summary": result.summary()}
    if options.model == "sam":
        record["cosine"] = mean_estimate(cosines(model, small, tested), seed=0).text(4)
    write_json(options.out / "windows.json", record)
    print(*(f"{name}: {value}" for name, value in record.items()), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
