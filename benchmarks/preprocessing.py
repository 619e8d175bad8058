"""Checks whether timm's transform, attnrx's data, and the script next to an ONNX file lead to the same classes.

The three preprocessings run on stored pictures, and on the same pictures with odd shapes, modes or orientations.

python benchmarks/preprocessing.py MODEL --weights FILE --data DATA.parquet [--images 250]

The benchmark needs the extra onnx. DATA is a parquet file with images of ImageNet classes, e.g. ImageNette's
validation images.
"""

import argparse
import io
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from PIL import Image, ImageOps

import attnrx as rx
from attnrx.data.model_data import preprocessing_of

ODD = 6  # the number of kinds of odd pictures, which alternate
COMMANDS = 6  # how many pictures run the script as a command. The other pictures only call its functions.


def odd(content: bytes, number: int) -> bytes:
    """Returns the picture with another shape, mode or orientation, selected by `number`."""
    picture, file, options = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO(), {}
    width, height = picture.size
    kind = number % ODD
    if kind == 0:
        picture = picture.crop((0, height // 6, width, height - height // 6))
    elif kind == 1:
        picture = picture.resize((width * 2, height * 3))
    elif kind == 2:
        picture = picture.convert("L")
    elif kind == 3:
        picture.putalpha(200)
    elif kind == 4:
        picture = picture.quantize(64)
    else:
        exif = Image.Exif()
        exif[0x0112] = 6
        picture, options = picture.rotate(90, expand=True), {"exif": exif}
    picture.save(file, "png", **options)
    return file.getvalue()


def pictures(data: Path, image: str, label: str, test: str, count: int) -> Iterator[tuple[bytes, int]]:
    rows = [row for row in parquet.read_table(data, columns=[image, label, test]).to_pylist() if row[test]]
    for row in rows[:: max(1, len(rows) // count)][:count]:
        yield row[image]["bytes"], row[label]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--image-column", default="image")
    parser.add_argument("--label-column", default="imagenet1k_label")
    parser.add_argument("--test-column", default="ilsvrc_val", help="true for the rows to use")
    parser.add_argument("--images", type=int, default=250)
    arguments = parser.parse_args(words)
    from timm.data import create_transform, resolve_model_data_config

    torch.manual_seed(0)
    model = rx.load(arguments.model, weights=arguments.weights).eval()
    transform: Any = create_transform(**resolve_model_data_config(model))
    columns = arguments.image_column, arguments.label_column, arguments.test_column
    stored = list(pictures(arguments.data, *columns, arguments.images))
    with TemporaryDirectory() as folder:
        exported = rx.export(model, Path(folder) / "model.onnx")
        script = exported.path.with_name("run_model.py")
        names: dict[str, Any] = {}
        exec(script.read_text().partition("here = Path")[0], names)
        for kind in ("stored", "odd"):
            given = [
                (odd(content, n) if kind == "odd" else content, label) for n, (content, label) in enumerate(stored)
            ]
            root = Path(folder) / kind / "test"
            (root / "all").mkdir(parents=True)
            for number, (content, _) in enumerate(given):
                (root / "all" / f"{number:06d}.png").write_bytes(content)
            labels = torch.tensor([label for _, label in given])
            inputs = {
                "timm": torch.stack([transform(upright(content)) for content, _ in given]),
                "attnrx": torch.cat([batch.images for batch in loaded(root.parent, model).batches(50)]),
                "script": torch.stack([torch.from_numpy(of_script(names, content, model)) for content, _ in given]),
            }
            with torch.no_grad():
                classes = {way: torch.cat([run(part).argmax(-1) for part in images.split(50)])
                           for way, images in inputs.items()
                           for run in [exported if way == "script" else model]}  # fmt: skip
            for way, found in classes.items():
                difference = float((inputs[way] - inputs["timm"]).abs().max())
                agreement = 100 * float((found == classes["timm"]).double().mean())
                accuracy = 100 * float((found == labels).double().mean())
                print(
                    f"{kind:7} {way:7} top-1 {accuracy:.1f} %, the class of timm's transform {agreement:.1f} %, "
                    f"largest difference of an input {difference:.1e}, {len(given)} pictures"
                )
            same = 0
            for number in range(COMMANDS):
                command = [sys.executable, str(script), str(root / "all" / f"{number:06d}.png")]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                same += printed.rpartition(" ")[0] == exported.facts["class_names"][int(classes["timm"][number])]
            print(f"{kind:7} command {same} of {COMMANDS} print the class of timm's transform")


def upright(content: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")


def loaded(root: Path, model: torch.nn.Module) -> Any:
    return rx.adapt_preprocessing(rx.load_data(root), model).test


def of_script(names: dict[str, Any], content: bytes, model: torch.nn.Module) -> np.ndarray:
    how = preprocessing_of(model).to_dict()
    pixels = names["pixels_of"](names["open_picture"](content), how["channels"], how["alpha"])
    return names["normalize_pixels"](names["fit_pixels"](pixels, how), how["mean"], how["std"])


if __name__ == "__main__":
    main()
