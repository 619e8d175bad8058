"""Protocols, rows and columns shared by Tables 4 and 5 of the SPOT paper."""

from dataclasses import replace

from attnrx_lab.papers.recipe import Column, Row
from attnrx_lab.papers.spot_transfer import ORIGINAL, SpotTransferExperiment

SEEDS = (0,)  # the paper reports one run of each
STAGES, DEEP_STAGES = "4,7,10", "5,9,13"

# A head on frozen features, as Section 6.2.2 has it; every training image of the dataset.
PROBE = "transfer"
# Every corruption of ImageNet-C at severity 3, on all images (Section 7.1).
CORRUPTED = "robustness(corruptions=all,severities=3,images=none)"

TITLES = {
    ORIGINAL: "baseline",
    "spot": "SPOT",
    "dynamicvit": "DynamicViT",
    "evit": "EViT",
    "class_attention": "class attention",
    "tome": "ToMe",
    "random": "random",
}
# Methods without training are measured with SPOT if a trained SPOT is given, otherwise alone.
UNTRAINED = tuple(f"{name}={name}:0.7@{STAGES}" for name in ("class_attention", "tome", "random"))
LEARNED = tuple(f"{name}={name}:0.7@{STAGES}" for name in ("spot", "dynamicvit", "evit"))
TINY_VIT = "timm:vit_tiny_patch16_224"


SPOT, SPOT_DEEP = (f"spot=spot:0.7@{STAGES}",), (f"spot=spot:0.7@{DEEP_STAGES}",)

DEIT_TINY = {
    dataset: SpotTransferExperiment(f"deit_tiny-{dataset}", "timm:deit_tiny_patch16_224", dataset, PROBE, SPOT)
    for dataset in ("cifar100", "food101", "dtd", "eurosat")
}
VIT_TINY = {
    dataset: SpotTransferExperiment(f"vit_tiny-{dataset}", TINY_VIT, dataset, PROBE, (*UNTRAINED, *LEARNED))
    for dataset in ("cifar10", "tiny_imagenet")
}
ROBUST = {
    name: SpotTransferExperiment(f"{name}-c", model, "imagenet-1k", CORRUPTED, candidates)
    for name, model, candidates in (
        ("deit_tiny", "timm:deit_tiny_patch16_224", SPOT),
        ("deit_small", "timm:deit_small_patch16_224", SPOT),
        ("lvvit_t", "lvvit:t", SPOT),
        ("lvvit_s", "lvvit:s", SPOT_DEEP),
    )
}
ROBUST_VIT_TINY = replace(
    VIT_TINY["cifar10"],
    subject="vit_tiny-c",
    dataset="imagenette",
    check=CORRUPTED,
    label_column="imagenet1k_label",
    test_column="ilsvrc_val",
)

COLUMNS = (
    Column("accuracy", "Accuracy", "measured", "accuracy", "%", decimals=1),
    Column("change", "Δ accuracy", "measured", "accuracy_change", "pp", decimals=1),
    Column("gflops", "GFLOPS", "costs", "gflops", decimals=2),
)


def pair_rows(title: str, experiment: SpotTransferExperiment) -> tuple[Row, ...]:
    """Returns a row for the original and one for every candidate of an experiment."""
    names = (ORIGINAL, *(text.partition("=")[0] for text in experiment.candidates))
    return tuple(Row(f"{title}, {TITLES[name]}", experiment.scenario, name) for name in names)
