"""Tensors have the annotated types and shapes in a walk through the verbs; `make test-oldest` checks every call."""

import os
import subprocess
import sys
from pathlib import Path

import jaxtyping
import torch

RULES = "qk=total_rank:0.6 vo=total_rank:0.75 fc1=total_rank:0.4"


def walk(folder: Path) -> None:
    """Diagnoses, prescribes, realizes, repairs, verifies, saves and loads small models of two forms."""
    import attnrx as rx  # under the import hook
    from attnrx.change.realization.repair import Repair
    from attnrx.show.checks import Accuracy, Costs, Fidelity
    from attnrx_lab.checks import Bounds
    from support import cases

    for form in ("svda", "dense"):
        model = cases.model(cases.CONFIGS[form])
        images = cases.pixels(cases.CONFIGS[form], 24)
        diagnosis = rx.diagnose(model, images, moments=True)
        prescription = rx.prescribe(diagnosis, f"{RULES} tokens=tome:0.5@2")
        rx.repair(rx.realize(model, rx.prescribe(diagnosis, RULES)), model, images, Repair(steps=5))
        small = rx.realize(model, prescription)
        rx.verify(small, model, images, [Accuracy(), Fidelity(), Bounds(), Costs()], prescription=prescription)
        rx.load(rx.save(small, folder / form, prescription=prescription))


def test_a_walk_through_the_verbs_has_the_annotated_shapes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, __file__, str(tmp_path)], env=environment, check=True, timeout=300)


if __name__ == "__main__":
    with jaxtyping.install_import_hook(["attnrx"], "type_checks.checked"):
        torch.set_default_dtype(torch.float64)
        walk(Path(sys.argv[1]))
