"""A training step of SVDA beside the same model with dense attention: what the norms and strengths cost.

    python benchmarks/training_step.py --precisions float32 bfloat16 --modes eager compiled --out step.json

A step is forward, cross-entropy, backward and AdamW, in float32 or under bfloat16 autocast. The two models take turns
in one run; the ratio is the median over rounds of SVDA / dense, with its 95 % interval.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from attnrx.support.estimate import Estimate
from attnrx.support.storage import write_json
from attnrx.vit.costs import Timing, device_name, interleave, ratio_of
from attnrx_lab.vision_transformer import VisionTransformer, initialize_, named_config


@dataclass(frozen=True)
class Setting:
    """What one line of the table was measured with."""

    scenario: str
    batch: int
    precision: str
    mode: str
    device: str
    rounds: int
    clock: str


@dataclass(frozen=True)
class Result:
    """The times of both forms, and their ratio."""

    setting: Setting
    svda: Timing
    dense: Timing
    ratio: Estimate

    def __str__(self) -> str:
        setting, ratio = self.setting, self.ratio
        return (
            f"{setting.precision:<10}{setting.mode:<9}{setting.batch:>6}"
            f"{1000 * self.dense.median:>11.1f}{1000 * self.svda.median:>10.1f}"
            f"{f'{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})':>22}"
        )


def training_step(form: str, setting: Setting) -> Callable[[], None]:
    """Returns a function that makes one step of a freshly initialized model on one fixed batch."""
    config, device = named_config(form, setting.scenario), setting.device
    model = initialize_(VisionTransformer(config), seed=0).to(device).train()
    # One batch on the device: reading and moving data is not a part of the step.
    images = torch.randn(setting.batch, config.channels, config.image_size, config.image_size, device=device)
    labels = torch.randint(config.classes, (setting.batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # fullgraph: a part that falls back to eager must fail instead of being timed as compiled.
    run = torch.compile(model, fullgraph=True, dynamic=False) if setting.mode == "compiled" else model

    def step() -> None:
        half = setting.precision == "bfloat16"
        # Weights and optimizer stay in float32, as in mixed-precision training.
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=half):
            loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure(setting: Setting) -> Result:
    """Times both forms in turn."""
    torch.compiler.reset()  # else earlier settings use up the limit of recompilations
    steps = {form: training_step(form, setting) for form in ("svda", "dense")}
    # The warm-up includes the compilation.
    seconds = interleave(steps, rounds=setting.rounds, warmup=3, clock=setting.clock)
    svda, dense = seconds["svda"], seconds["dense"]
    return Result(setting, Timing.of(svda), Timing.of(dense), ratio_of(svda, dense))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="cifar10", help="configuration, e.g. cifar10 or food101")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clock", default="cuda" if cuda else "wall", help="cpu: for a machine that is busy")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; all that torch takes if not given")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse(words)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    about = {"hardware": device_name(arguments.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(", ".join(f"{name}: {fact}" for name, fact in about.items()))
    print(f"{'precision':<10}{'mode':<9}{'batch':>6}{'dense ms':>11}{'svda ms':>10}{'svda / dense (95 %)':>22}")
    results = []
    for precision in arguments.precisions:
        for mode in arguments.modes:
            about_run = (arguments.device, arguments.rounds, arguments.clock)
            results.append(measure(Setting(arguments.scenario, arguments.batch, precision, mode, *about_run)))
            print(results[-1], flush=True)
    if arguments.out:
        record = {"benchmark": "training step", **about, "results": [asdict(result) for result in results]}
        print(f"written to {write_json(arguments.out, record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
