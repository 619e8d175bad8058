"""The error of restored features of patches, by restoration and policy, with the speed of both.

    python benchmarks/dense_features.py timm:vit_tiny_patch16_224 --weights W --data imagenette224.parquet \
        --label-column imagenet1k_label --test-column ilsvrc_val --policies tome:13@every ward:13@every

The error is the relative squared error of the last normalized features of a patch, mean over the patches and images.
Restorations differ in the share of a patch's difference from its representative that is added again: none ("copy", the
plain gather of ToMe), all of it ("whole"), or l / n before layer l of n ("depth", which attnrx uses). Speeds are CPU
times of one thread, in turns, the least of all rounds, relative to the library's own model.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.show.checks.outputs import patch_features
from attnrx.vit.models import attach_tokens_, family_of, recording_tokens, working_copy
from attnrx.vit.tokens import gathered_rows, parse_policy

SHARES: dict[str, Callable[[int, int], float]] = {
    "copy": lambda layer, depth: 0.0,
    "whole": lambda layer, depth: 1.0,
    "depth": lambda layer, depth: layer / depth,
}


def restorations(given: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the features of all patches by every restoration."""
    model: Any = working_copy(given)
    # "attnrx" are the features of the package, which must be those of "depth" below.
    with recording_tokens(model) as runs:
        features, source = {"attnrx": patch_features(model, images)}, model.source
    run, prefix = runs[-1], source.num_prefix_tokens
    for name, share in SHARES.items():
        patches = run.present[:, prefix:]
        # From the last stage to the first: the patches after a stage are those before the next one.
        for stage in reversed(run.stages):
            part = share(stage.layer, len(source.blocks))
            patches = gathered_rows(patches - part * stage.remaining, stage.sources) + part * stage.before
        features[name] = source.norm(patches).double()
    return features


def main(words: Sequence[str] | None = None) -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "a model of timm")
    add_data(parser, "whose test images are used")
    parser.add_argument("--policies", nargs="+", default=["tome:13@every", "ward:13@every", "ward:12@every"])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)  # the CPU time of several threads includes their waiting
    torch.set_grad_enabled(False)
    original = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    batches = [
        batch.images
        for batch in splits_argument(original, arguments).test.take(arguments.images).batches(arguments.batch)
    ]
    library = family_of(original).library_model(original).eval()
    models = {text: copy.deepcopy(original) for text in arguments.policies}
    for text, model in models.items():
        attach_tokens_(model, family_of(model), parse_policy(text))
        model.eval()
    seconds = speeds({"library": library, "original": original, **models}, batches[0], arguments.rounds)
    print(f"{'policy':30} {'copy':>7} {'whole':>7} {'depth':>7} {'attnrx':>7}  features  answers")
    print(f"{'original':30} {'':31}  {seconds['original'][0]:7.2f}x {seconds['original'][1]:7.2f}x")
    for text, model in models.items():
        errors: dict[str, list[float]] = {}
        for images in batches:
            base = patch_features(original, images)
            for name, other in restorations(model, images).items():
                error = ((other - base).square().sum(-1) / base.square().sum(-1)).mean(1)
                errors.setdefault(name, []).extend(error.tolist())
        means = {name: sum(each) / len(each) for name, each in errors.items()}
        row = " ".join(f"{means[name]:7.4f}" for name in (*SHARES, "attnrx"))
        print(f"{text:30} {row}  {seconds[text][0]:7.2f}x {seconds[text][1]:7.2f}x", flush=True)


def speeds(models: dict[str, nn.Module], images: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the speed of features and of answers relative to those of the first model."""
    least: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for name, model in models.items():
            for kind, run in (("features", model.forward_features), ("answers", model)):
                start = time.process_time()
                run(images)
                seconds = time.process_time() - start
                # The least: other processes and interrupts only add to a time.
                least[name, kind] = min(seconds, least.get((name, kind), seconds))
    base = next(iter(models))
    return {
        name: (least[base, "features"] / least[name, "features"], least[base, "answers"] / least[name, "answers"])
        for name in models
    }


if __name__ == "__main__":
    main()
