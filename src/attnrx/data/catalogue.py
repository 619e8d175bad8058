"""The named datasets: their hub ids, columns, image sizes and normalizations."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attnrx.data.parquet import Columns
from attnrx.support.preprocessing import ImageGeometry, Normalization

IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
COLUMNS = Columns(label_column="label")


@dataclass(frozen=True)
class DatasetCard:
    """The properties of a named dataset.

    The normalization is the published statistic of the training images, at their own size and without borders. `flip`
    and `shift` tell whether the augmentation mirrors images, and crops them from a padded image.
    """

    geometry: ImageGeometry
    normalization: Normalization
    flip: bool = True
    shift: bool = True
    hub_id: str | None = None
    columns: Columns = COLUMNS
    folder: str | None = None
    revision: str | None = None
    ignored: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()


DATASETS: Mapping[str, DatasetCard] = {
    "digits": DatasetCard(
        geometry=ImageGeometry.of_size(16, 1, "fill"),  # 8x8 as stored
        normalization=Normalization((0.3053,), (0.3760,)),
        flip=False,  # mirrored digits are other signs
    ),
    "cluttered-digits": DatasetCard(
        geometry=ImageGeometry.of_size(40, 1, "fill"),
        normalization=Normalization((0.1268,), (0.1959,)),
        flip=False,
        shift=False,  # fragments fill whole patches
    ),
    "fashion_mnist": DatasetCard(
        geometry=ImageGeometry.of_size(32, 1, "pad"),  # 28x28 as stored
        normalization=Normalization((0.2860,), (0.3530,)),
        hub_id="zalando-datasets/fashion_mnist",
    ),
    "cifar10": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        hub_id="uoft-cs/cifar10",
        columns=Columns(image_column="img", label_column="label"),
    ),
    "cifar100": DatasetCard(
        geometry=ImageGeometry.of_size(32, 3, "fill"),
        normalization=Normalization((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        hub_id="uoft-cs/cifar100",
        columns=Columns(image_column="img", label_column="fine_label"),
    ),
    "food101": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="ethz/food101",
    ),
    "tiny_imagenet": DatasetCard(
        geometry=ImageGeometry.of_size(64, 3, "fill"),
        normalization=Normalization((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
        hub_id="zh-plus/tiny-imagenet",
    ),
    "imagenette": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="frgfm/imagenette",
        folder="320px",
        revision="refs/convert/parquet",  # the main branch is a loading script, which datasets 4 no longer runs
        other_names=("imagenette224", "imagenette2", "imagenette2-320"),
    ),
    "imagenet-1k": DatasetCard(
        geometry=ImageGeometry.of_size(224, 3, "photo"),
        normalization=IMAGENET,
        hub_id="ILSVRC/imagenet-1k",
        ignored=("test",),  # its labels are hidden: all are -1
        other_names=("imagenet1k", "imagenet_1k", "imagenet"),
    ),
}


def known_as(name: str) -> str | None:
    """Returns the catalogue's name of a dataset that may be spelt as its files are."""
    return next((canonical for canonical, card in DATASETS.items() if name in (canonical, *card.other_names)), None)


def local_copy(name: str, folder: Path) -> Path | None:
    """Finds `<name>.parquet`, or a folder `<name>`, under any of the dataset's names."""
    spellings = (name, *DATASETS[name].other_names)
    paths = (folder / ending for spelling in spellings for ending in (f"{spelling}.parquet", spelling))
    return next((path for path in paths if path.exists()), None)
