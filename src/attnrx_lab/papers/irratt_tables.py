"""Protocols and columns of the IrrAtt paper's tables and figures."""

from attnrx_lab.papers.fusion import FusionExperiment, rule_of
from attnrx_lab.papers.irratt import IrrattExperiment, IrrattMethod
from attnrx_lab.papers.recipe import Column, Row

# Ranks as the paper prints them, for heads of 64 directions: 6 of them in DeiT-S, 12 in DeiT-B.
HEAD, SMALL, BASE = 64, 6 * 64, 12 * 64
VO = 32 / HEAD
SMALL_MLP, BASE_MLP = 152 / SMALL, 304 / BASE

SMALL_METHODS = (
    IrrattMethod("original"),
    *(IrrattMethod(f"truncatt-{rank}", "truncatt", rank / HEAD, VO) for rank in (16, 22, 32)),
    *(IrrattMethod(f"cp-{rank}", "cp", rank / SMALL, VO) for rank in (96, 132, 192)),
    *(IrrattMethod(f"irratt-{rank}", "irratt", rank / SMALL, VO) for rank in (96, 132, 192)),
    IrrattMethod("irratt-192-constrained", "irratt", 192 / SMALL, VO, by_training=True),
    IrrattMethod("full-mlp", mlp=SMALL_MLP),
    IrrattMethod("truncatt-32-mlp", "truncatt", 32 / HEAD, VO, SMALL_MLP),
    IrrattMethod("cp-192-mlp", "cp", 192 / SMALL, VO, SMALL_MLP),
    IrrattMethod("irratt-192-mlp", "irratt", 192 / SMALL, VO, SMALL_MLP),
)
BASE_METHODS = (
    IrrattMethod("original"),
    IrrattMethod("truncatt-13-mlp", "truncatt", 13 / HEAD, VO, BASE_MLP),
    IrrattMethod("cp-168-mlp", "cp", 168 / BASE, VO, BASE_MLP),
    IrrattMethod("irratt-168-mlp", "irratt", 168 / BASE, VO, BASE_MLP),
)

# The fine-tuned models of the paper, and a pre-trained ViT-Tiny on ten classes of ImageNet, which is not fine-tuned.
DEIT_SMALL = IrrattExperiment(
    "deit_small", "timm:deit_small_patch16_224", "imagenet-1k", SMALL_METHODS, epochs=60, batch_size=512
)
DEIT_BASE = IrrattExperiment(
    "deit_base", "timm:deit_base_patch16_224", "imagenet-1k", BASE_METHODS, epochs=60, batch_size=256
)
VIT_TINY = IrrattExperiment(
    "vit_tiny",
    "timm:vit_tiny_patch16_224",
    "imagenette",
    (*SMALL_METHODS, *BASE_METHODS[1:]),
    label_column="imagenet1k_label",
    test_column="ilsvrc_val",
)
SEEDS = (0,)  # the paper trained every model once

COST_COLUMNS = (
    Column("mhsa", "MHSA FLOPs CR", "paper", "mhsa_percent", "%", decimals=1, exact=True),
    Column("macs", "FLOPs CR", "paper", "macs_percent", "%", decimals=1, exact=True),
    Column("params", "# param CR", "paper", "params_percent", "%", decimals=1, exact=True),
)
ACCURACY = Column("accuracy", "Top-1", "measured", "accuracy", "%")
CHANGE = Column("change", "Δ top-1", "measured", "accuracy_change", "pp")
# Not in the paper: the distance of a model from the original, and its realized costs.
OWN_COLUMNS = (
    Column("agreement", "agrees with original", "measured", "agreement_to_original", "%"),
    Column("divergence", "KL to original (nats)", "measured", "divergence_to_original", decimals=3),
    Column("realized", "FLOPs CR, realized", "realized", "macs_percent", "%", decimals=1),
)

TITLES = {"full": "original", "truncatt": "TruncAtt", "cp": "CP", "irratt": "IrrAtt"}


def method_rows(title: str, experiment: IrrattExperiment, directions: int) -> tuple[Row, ...]:
    """Returns a row for every method of an experiment, with the ranks of a model of so many directions a layer."""
    return tuple(
        Row(f"{title}, {label(method, directions)}", experiment.scenario, method.name) for method in experiment.methods
    )


def label(method: IrrattMethod, directions: int) -> str:
    """Returns the name of a method with its ranks, e.g. `IrrAtt 192, VO 32, MLP 152`, in heads of 64 directions."""
    whole = HEAD if method.qk == "truncatt" else directions
    own = TITLES[method.qk] if method.qk == "full" else f"{TITLES[method.qk]} {round(method.rank * whole)}"
    parts = [own + " †" * method.by_training]
    parts += [] if method.vo is None else [f"VO {round(method.vo * HEAD)}"]
    parts += [] if method.mlp is None else [f"MLP {round(method.mlp * directions)}"]
    return ", ".join(parts)


# Figures 2 and 3: the fusion matrices of DeiT-S at a total rank of 96, and of DeiT-B at 168; ViT-Tiny at both shares.
FIGURE_2, FIGURE_3 = 96 / SMALL, 168 / BASE
FUSIONS = {
    "deit_small": FusionExperiment("deit_small", "timm:deit_small_patch16_224", (FIGURE_2,)),
    "deit_base": FusionExperiment("deit_base", "timm:deit_base_patch16_224", (FIGURE_3,)),
    "vit_tiny": FusionExperiment("vit_tiny", "timm:vit_tiny_patch16_224", (FIGURE_2, FIGURE_3)),
}

PLACE_COLUMNS = tuple(
    Column(f"{kind}_{quantity}", f"{quantity}{words}", kind, quantity, decimals=1)
    for kind, words in (("fusion", ""), ("best", ", best on the weights"))
    for quantity in ("mean", "median", "least", "most")
)
BLOCK_COLUMNS = (
    Column("as_fitted", "energy in blocks, as fitted", "fusion", "as_fitted", "%", decimals=1),
    Column("rescaled", "energy in blocks, rescaled", "fusion", "rescaled", "%", decimals=1),
    Column("by_chance", "the same of random columns", "fusion", "by_chance", "%", decimals=1),
    Column("least", "smallest block", "fusion", "least", decimals=0),
    Column("most", "largest block", "fusion", "most", decimals=0),
    Column("error", "relative error of the scores", "fusion", "error", decimals=3),
)


def place_rows(title: str, scenario: str, heads: int) -> tuple[Row, ...]:
    """Returns a row for every position of a head among the sorted ranks of a layer (Figure 2)."""
    return tuple(
        Row(f"{title}, head {place} of {heads}", scenario, rule_of(FIGURE_2, f"head-{place}"))
        for place in range(1, heads + 1)
    )


def layer_rows(title: str, scenario: str, layers: int) -> tuple[Row, ...]:
    return tuple(
        Row(f"{title}, layer {layer}", scenario, rule_of(FIGURE_3, f"layer-{layer}")) for layer in range(layers)
    )
