"""Defines the recipes for the tables and figures of the IrrAtt paper: their protocols, rows and columns."""

from attnrx_lab.cluttered_digits import CLUTTERED
from attnrx_lab.papers.fusion import FusionExperiment
from attnrx_lab.papers.irratt import IrrattExperiment, IrrattMethod
from attnrx_lab.papers.recipe import Column, Recipe, Row
from attnrx_lab.papers.spot import ORIGINALS

PAPER = "Vision Transformer with Irregular Attention"

# The paper prints ranks for heads of 64 directions. DeiT-S has 6 such heads, and DeiT-B has 12.
HEAD, SMALL, BASE = 64, 6 * 64, 12 * 64
VO = 32 / HEAD
SMALL_MLP, BASE_MLP = 152 / SMALL, 304 / BASE

CLUTTER_WIDTH = ORIGINALS["cluttered_digits"].width

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

# The paper's fine-tuned models, and a pre-trained ViT-Tiny on ten ImageNet classes. Each row took the paper 1.5 to 2
# days on an A100. ViT-Tiny is not fine-tuned and takes minutes on a CPU.
MODELS = {size: f"timm:{size}_patch16_224" for size in ("deit_small", "deit_base", "vit_tiny")}
DEIT_SMALL, DEIT_BASE = (
    IrrattExperiment(name, MODELS[name], "imagenet-1k", methods, epochs=60, batch_size=batch, held_out=0.0)
    for name, methods, batch in (("deit_small", SMALL_METHODS, 512), ("deit_base", BASE_METHODS, 256))
)
VIT_TINY = IrrattExperiment(
    "vit_tiny",
    MODELS["vit_tiny"],
    "imagenette",
    (*SMALL_METHODS, *BASE_METHODS[1:]),
    label_column="imagenet1k_label",
    test_column="ilsvrc_val",
    factors="data",
)
# The same methods on a small model that the recipe trains first. They take minutes per seed on one CPU core.
CLUTTER = IrrattExperiment(
    "cluttered_digits",
    None,
    CLUTTERED,
    SMALL_METHODS,
    epochs=2,
    batch_size=64,
    learning_rate=5e-4,
    gradient_clip=1.0,
    ema=None,
    factors="data",
)
SEEDS = (0,)  # the paper states no seeds

COST_COLUMNS = (
    Column("mhsa", "MHSA FLOPs CR", "paper", "mhsa_percent", "%", decimals=1, exact=True),
    Column("macs", "FLOPs CR", "paper", "macs_percent", "%", decimals=1, exact=True),
    Column("params", "# param CR", "paper", "params_percent", "%", decimals=1, exact=True),
)
ACCURACY = Column("accuracy", "Top-1", "measured", "accuracy", "%")
CHANGE = Column("change", "Δ top-1", "measured", "accuracy_change", "pp")
# Columns that the paper does not have: a model's distance from the original, and its realized costs.
OWN_COLUMNS = (
    Column("agreement", "agrees with original", "measured", "agreement_to_original", "%"),
    Column("divergence", "KL to original (nats)", "measured", "divergence_to_original", decimals=3),
    Column("realized", "FLOPs CR, realized", "realized", "macs_percent", "%", decimals=1),
)

TITLES = {"full": "original", "truncatt": "TruncAtt", "cp": "CP", "irratt": "IrrAtt"}


def method_rows(title: str, experiment: IrrattExperiment, directions: int) -> tuple[Row, ...]:
    """Returns one table row for each method of an experiment. `directions` is the number of directions in a layer."""
    return tuple(
        Row(f"{title}, {label(method, directions)}", experiment.scenario, method.name) for method in experiment.methods
    )


def label(method: IrrattMethod, directions: int) -> str:
    """Returns a method's name with its ranks for heads of 64 directions, e.g. `IrrAtt 192, VO 32, MLP 152`."""
    whole = HEAD if method.qk == "truncatt" else directions
    scores = TITLES[method.qk] if method.qk == "full" else f"{TITLES[method.qk]} {round(method.rank * whole)}"
    parts = [scores + " †" * method.by_training]
    parts += [] if method.vo is None else [f"VO {round(method.vo * HEAD)}"]
    parts += [] if method.mlp is None else [f"MLP {round(method.mlp * directions)}"]
    return ", ".join(parts)


# IrrAtt's Figures 2 and 3 show the fusion matrices of DeiT-S at a total rank of 96, and of DeiT-B at 168. We decompose
# ViT-Tiny at both shares. Each model takes minutes on a CPU core. For a fine-tuned model, pass --model
# runs/irratt/.../train/cp-168-mlp.
FIGURE_2, FIGURE_3 = 96 / SMALL, 168 / BASE
FUSIONS = {
    name: FusionExperiment(name, MODELS[name], shares)
    for name, shares in {"deit_small": (FIGURE_2,), "deit_base": (FIGURE_3,), "vit_tiny": (FIGURE_2, FIGURE_3)}.items()
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

RECIPES = {
    # Costs are exact, except in one cell. The attention of DeiT-B with CP 168 is printed as 49.7 %, but the convention
    # that reproduces all other cells computes 49.614 %.
    "table1": Recipe(
        "TruncAtt, CP SlimAtt and IrrAtt",
        (
            *method_rows("DeiT-S", DEIT_SMALL, SMALL),
            *method_rows("DeiT-B", DEIT_BASE, BASE),
            *method_rows("ViT-Tiny", VIT_TINY, SMALL // 2),
            *method_rows("digits among clutter", CLUTTER, CLUTTER_WIDTH),
        ),
        (ACCURACY, CHANGE, *COST_COLUMNS, *OWN_COLUMNS),
        (DEIT_SMALL, DEIT_BASE, VIT_TINY, CLUTTER),
        table="1",
        not_stated="losses, label smoothing (0.1 here), gradient clipping (none here), augmentation (crops and "
        "mirroring here), precision, seeds, the decay of the mean of the weights (0.99996 here), how often Algorithms "
        "2 and 3 iterate (5 times each here), how constrained training enforces Eq. 7 and how long it takes (as long "
        "as the fine-tuning here), and how fine-tuning runs for DeiT-S (Table 3 of its appendix lists AdamW, its rates "
        "and the warm-up for DeiT-B)",
        seeds=SEEDS,
    ),
    # VTP, WDPruning and UVC are not measured. Their numbers are quoted from the paper.
    "table2": Recipe(
        "IrrAtt and channel pruning, DeiT-B",
        (
            Row("IrrAtt 168, VO 32, MLP 304", "deit_base", "irratt-168-mlp"),
            *(Row(other, "deit_base") for other in ("VTP", "WDPruning", "UVC")),
            Row("ViT-Tiny, IrrAtt 42, VO 32, MLP 76", "vit_tiny", "irratt-168-mlp"),
        ),
        (CHANGE, *COST_COLUMNS[1:], *OWN_COLUMNS),
        (DEIT_BASE, VIT_TINY),
        table="2",
        not_stated="what irratt/table1 lists",
        seeds=SEEDS,
    ),
    "figure2": Recipe(
        "Ranks of the heads at a quarter of the directions, over the layers",
        tuple(
            Row(f"{title}, head {place} of {heads}", scenario, f"{FIGURE_2:g}/head-{place}")
            for title, scenario, heads in (("DeiT-S", "deit_small", 6), ("ViT-Tiny", "vit_tiny", 3))
            for place in range(1, heads + 1)
        ),
        PLACE_COLUMNS,
        (FUSIONS["deit_small"], FUSIONS["vit_tiny"]),
        table="Figure 2",
        not_stated="how many sweeps the fit takes and where it starts",
        seeds=SEEDS,
    ),
    "figure3": Recipe(
        "Blocks of the fusion matrices of CP SlimAtt",
        tuple(
            Row(f"{title}, layer {layer + 1}", scenario, f"{FIGURE_3:g}/layer-{layer}")
            for title, scenario in (("DeiT-B", "deit_base"), ("ViT-Tiny", "vit_tiny"))
            for layer in range(12)
        ),
        BLOCK_COLUMNS,
        (FUSIONS["deit_base"], FUSIONS["vit_tiny"]),
        table="Figure 3",
        not_stated="how many sweeps the fit takes and where it starts, and which layer is drawn",
        seeds=SEEDS,
    ),
}
