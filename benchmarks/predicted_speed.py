"""Compares the speed that a cost table predicts for plans with the measured speed, in several runtimes.

    python benchmarks/predicted_speed.py MODEL --data DATA [--weights W] [--to eager onnx openvino] [--batch 1]

The plans change hidden units, ranks or merging stages in some layers, or combine these changes. No cost table was
fitted to them. Predicted and measured speeds are relative to the unchanged model in the same runtime. Cost tables are
measured as for `--effort quick`, or come from the cache if an earlier plan measured them.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.decide.planning.measured_costs import PlanTimer
from attnrx.decide.planning.space import Choices, Space
from attnrx.nouns.effort import ROUND_FACTOR, PlanSettings
from attnrx.support.tables import markdown_table
from attnrx.vit.costs import Conditions

IMAGES, DIAGNOSED = 64, 64


def plans(space: Space) -> dict[str, Choices]:
    """Returns plans by name. A level counts removed eighths, so level 4 keeps half and level 2 three quarters."""
    depth, patches = space.depth, space.patches
    nothing = Choices.nothing(depth)

    def level(value: int, every: int = 1) -> tuple[int, ...]:
        return tuple(value * (layer % every == 0) for layer in range(depth))

    def stages(shares: dict[int, float]) -> tuple[int, ...]:
        counts = [0] * depth
        for layer, share in shares.items():
            counts[layer] = int(share * patches) // space.step * space.step
        return tuple(counts)

    first = max(depth // 4, 1)
    early, two = stages({first: 0.4}), stages({first: 0.2, max(depth // 2, first + 1): 0.2})
    return {
        "three quarters of the hidden units": replace(nothing, mlp=level(2)),
        "half of the hidden units in every second layer, 40 % of the patches merged early": replace(
            nothing, mlp=level(4, 2), num_pruned=early
        ),
        "half of the scores and values in every second layer": replace(nothing, qk=level(4, 2), vo=level(4, 2)),
        "two stages of 20 %, three quarters of the hidden units": replace(nothing, mlp=level(2), num_pruned=two),
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "the model")
    add_data(parser, "images to diagnose and to calibrate files on")
    parser.add_argument("--to", nargs="+", default=["eager", "onnx", "openvino"], help="formats, or eager")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(words)
    model = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust)
    images = splits_argument(model, arguments).train.take(IMAGES)
    diagnosis = rx.diagnose(model, images, moments=True, images=DIAGNOSED, batch_size=32)
    rows = []
    for to in arguments.to:
        settings = PlanSettings.preset(
            "quick",
            batch=arguments.batch,
            conditions=Conditions(threads=arguments.threads),
            to=None if to == "eager" else to,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        space = Space.of(model, diagnosis, rx.planning.Target("latency", 0.5), settings)
        timer, chosen = PlanTimer(space, settings, images), plans(space)
        table = timer.cost_table()
        made = {name: rx.realize(model, space.prescription(choices)) for name, choices in chosen.items()}
        rounds = ROUND_FACTOR * timer.settings.whole_rounds
        shares = timer.latency_shares({"unchanged": model, **made}, rounds)
        before = table.total(Choices.nothing(space.depth))
        for name, choices in chosen.items():
            predicted, measured = before / table.total(choices), shares["unchanged"] / shares[name]
            error = f"{100 * (predicted / measured - 1):+.1f} %"
            rows.append((to, name, f"{predicted:.2f}x", f"{measured:.2f}x", error))
            settings.log(" | ".join(rows[-1]))
    print(markdown_table(("runtime", "plan", "predicted", "measured", "error"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
