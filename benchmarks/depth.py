"""Compares removing blocks with narrowing MLPs at the same MACs, by divergence from the original and by speed.

    python benchmarks/depth.py MODEL --data DATA [--counts 1 2] [--distill 2] --out runs/depth

For every count, `least_needed_blocks` removes the blocks that the model needs least. The result is compared with a
portable plan, which has one width for all MLPs at the same share of the MACs. Both models are repaired and, with
--distill, distilled in the same way. The divergence is measured on test images that no model was fitted to. All models
run in the library's own code and are timed in turns, at batch 1 and 32, by CPU time on one thread.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.realizing import Fit, realize_and_fit
from attnrx.change.realization.repair import Repair
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.decide.planning import PlanSettings, least_needed_blocks, prescribed_costs
from attnrx.decide.planning.uniform import UniformCosts, UniformFrontier, UniformSpace
from attnrx.show.checks import Fidelity
from attnrx.support.storage import write_json
from attnrx.support.tables import markdown_table
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies
from attnrx.vit.models import family_of

FITTED, CHOSEN = 256, 64  # how many images to fit to, and how many of these to diagnose on and choose blocks with


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for every model."""
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust)
    splits = splits_argument(model, arguments)
    fitted, tested = splits.train.take(arguments.fitted), splits.test.take(arguments.images)
    chosen = fitted.take(min(CHOSEN, arguments.fitted))
    diagnosis = rx.diagnose(model, chosen, moments=True)
    space = UniformSpace.of_class(model, diagnosis, PlanSettings(portable=True))
    frontier = UniformFrontier(space, UniformCosts(space, "macs"))
    fits: list[Fit] = [Repair(arguments.steps, images=2)]
    fits += [Distill(arguments.distill)] if arguments.distill else []
    family, models, rows = family_of(model), dict[str, nn.Module](), list[dict[str, Any]]()
    whole = family.costs(model).macs
    for count in arguments.counts:
        depth = least_needed_blocks(model, chosen, count)
        removed = rx.prescribe(diagnosis, {"depth": depth}, portable=True)
        share = prescribed_costs(model, removed).macs / whole
        narrow = space.prescription(frontier.at(share, space.stock.heads).choices)
        for what, prescription in (("fewer blocks", removed), ("narrower", narrow)):
            realized = rx.realize(model, prescription)
            small = realize_and_fit(model, prescription, fitted, fits)
            name = f"{what}, {100 * family.costs(small).macs / whole:.1f} % of the MACs"
            models[name] = small
            row: dict[str, Any] = {"count": count, "what": what, "rules": str(prescription)}
            for stage, each in (("unfitted", realized), ("fitted", small)):
                findings = rx.verify(each, model, tested, [Fidelity()]).of("fidelity")
                known = [one for one in findings if one.details.get("quantity")]
                row[stage] = {one.details["quantity"]: [one.value, one.low, one.high] for one in known}
            rows.append({"name": name, **row})
    for batch in (1, 32):
        pixels = torch.randn(batch, *family.input_shape(model))
        protocol = LatencyProtocol(Conditions(threads=1, plain=True), arguments.rounds, clock="cpu")
        speeds = compare_latencies({**models}, model, pixels, protocol)
        for row in rows:
            faster = speeds[row["name"]].faster
            row[f"faster at batch {batch}"] = [faster.value, faster.low, faster.high]
    return rows


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    add_data(parser, "images to choose, fit and test on")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="the numbers of removed blocks")
    parser.add_argument("--steps", type=int, default=100, help="steps of the repair of every block")
    parser.add_argument("--distill", type=int, default=0, help="epochs of the distillation; 0 for none")
    parser.add_argument("--fitted", type=int, default=FITTED, help="images to fit to")
    parser.add_argument("--images", type=int, default=500, help="test images")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the timings")
    parser.add_argument("--out", type=Path, required=True, help="the folder of depth.json and depth.md")
    arguments = parser.parse_args(words)
    rows = measured(arguments)
    write_json(arguments.out / "depth.json", {"rows": rows})

    def told(numbers: list[float] | None, digits: int) -> str:
        if numbers is None:
            return "-"
        value, low, high = (f"{number:.{digits}f}" for number in numbers)
        return f"{value} [{low}, {high}]"

    columns = ("model", "divergence, not fitted", "fitted", "faster, batch 1", "batch 32")
    cells = [
        (
            f"{row['name']} ({row['rules']})",
            told(row["unfitted"].get("divergence"), 3),
            told(row["fitted"].get("divergence"), 3),
            told(row["faster at batch 1"], 2),
            told(row["faster at batch 32"], 2),
        )
        for row in rows
    ]
    page = markdown_table(columns, cells)
    (arguments.out / "depth.md").write_text(page + "\n")
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
