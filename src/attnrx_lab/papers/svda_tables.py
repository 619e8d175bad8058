"""The protocol of each dataset and the columns, shared by the tables of the SVDA paper."""

from attnrx_lab.papers.recipe import Column, Row
from attnrx_lab.papers.svda import SvdaExperiment

# Table 4 of the paper.
PROTOCOL: dict[str, SvdaExperiment] = {
    "fashion_mnist": SvdaExperiment("fashion_mnist", epochs=80, batch_size=256),
    "cifar10": SvdaExperiment("cifar10", epochs=80, batch_size=256),
    "cifar100": SvdaExperiment("cifar100", epochs=100, batch_size=256),
    "food101": SvdaExperiment("food101", epochs=40, batch_size=64),
}

# Tables 1 and 6: every dataset at rho = 0.90. Tables 2 and 8: CIFAR-10 over rho.
TITLES = {"fashion_mnist": "FashionMNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "food101": "Food-101"}
DATASET_ROWS = tuple(Row(title, dataset, "rho-0.90") for dataset, title in TITLES.items())
RHO_ROWS = tuple(Row(f"rho = {rho}", "cifar10", f"rho-{rho}") for rho in ("0.85", "0.90", "0.95"))

# The paper counts what is lost, so a negative "Acc. change" is a gain; its Rel. L2 and agreement are between the masked
# and the compressed (here: renormalized) model.
PAPER_COLUMNS = (
    Column("removed", "Dir. pruned", "renormalized", "removed", "%"),
    Column("accuracy_lost", "Acc. change (lost)", "renormalized", "accuracy_change", "pp", factor=-1.0),
    Column("params_down", "Params ↓", "renormalized", "params_down", "%"),
    Column("macs_down", "MACs ↓", "renormalized", "macs_down", "%"),
    Column("discrepancy", "Rel. L2", "renormalized", "discrepancy_to_masked", decimals=None),
    Column("agreement", "Pred. agree", "renormalized", "agreement_to_masked", "%", null=100.0),
)

# Not in the paper: the distance of each model from the original.
ORIGINAL_COLUMNS = (
    Column("original_accuracy", "Accuracy of the original", "renormalized", "original_accuracy", "%"),
    *(
        Column(f"{kind}_to_original", f"{kind} vs original, Rel. L2", kind, "discrepancy_to_original", decimals=None)
        for kind in ("mask", "renormalized", "refit")
    ),
)

# "SVDA - control", in points of accuracy, as the paper has it; and, paired, how much nearer to the original SVDA is.
CONTROL_COLUMNS = (
    Column("over_random", "SVDA over Random", "renormalized", "more_accurate_than_random", "pp"),
    Column("over_largest", "SVDA over Largest-Σ", "renormalized", "more_accurate_than_largest", "pp"),
    *(
        Column(f"{kind}_{control}", f"nearer than {control}, {kind}", kind, f"nearer_than_{control}", decimals=None)
        for kind in ("mask", "renormalized", "refit")
        for control in ("random", "largest")
    ),
)

REALIZATION_COLUMNS = (
    Column("removed", "Dir. pruned", "mask", "removed", "%"),
    *(
        Column(f"{kind}_to_original", f"{kind} vs original, Rel. L2", kind, "discrepancy_to_original", decimals=None)
        for kind in ("mask", "exact", "renormalized", "refit")
    ),
    Column("refit_ratio", "refit / renormalized", "refit", "discrepancy_over_renormalized", decimals=2),
    *(
        Column(f"{kind}_agreement", f"{kind} agrees with original", kind, "agreement_to_original", "%")
        for kind in ("mask", "renormalized", "refit")
    ),
    *(
        Column(f"{kind}_accuracy", f"accuracy change, {kind}", kind, "accuracy_change", "pp")
        for kind in ("mask", "renormalized", "refit")
    ),
)
