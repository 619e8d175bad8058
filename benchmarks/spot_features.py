"""How much a fresh SPOT predictor depends on its attention features.

    python benchmarks/spot_features.py timm:vit_tiny_patch16_224 --weights FILE --data imagenette --images 50

For predictors drawn from several seeds: the standard deviation over the patches of token and attention features, and
the share of the patches kept at each stage that the same predictor keeps with all attention features set to zero.
"""

import argparse
import copy
import sys
from functools import partial

import torch
from torch import nn

from attnrx.change.realization import realize_tokens_
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.nouns.prescription import TokenPrescription
from attnrx.show.checks.statistics import mean_estimate
from attnrx.vit.models import family_of, reduction_of
from attnrx.vit.tokens import TokenState, parse_policy
from attnrx_lab.tokens.learned_scores import odds
from attnrx_lab.tokens.spot import SpotPredictor

Measured = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def measure(predictor: SpotPredictor, state: TokenState, count: int) -> Measured:
    """Returns, for every image: the shared patches and the deviations of token and attention features."""
    assert predictor.tokens is not None
    tokens = predictor.tokens(state.patches, state.present_mask)
    assert state.attention is not None
    attention = predictor._features(state, state.attention)
    inputs = (torch.cat([tokens, each], -1) for each in (attention, torch.zeros_like(attention)))
    scores = [odds(predictor.scores(each)) for each in inputs]
    local = tokens[..., : tokens.shape[-1] - tokens.shape[-1] // 2]  # the others are means over the patches
    with_features, without = (
        torch.zeros_like(each, dtype=torch.bool).scatter(-1, each.topk(count).indices, True) for each in scores
    )
    shared = (with_features & without).sum(-1).double() / count
    return shared, local.std(1).mean(1), attention.std(1).mean(1)


def watch(
    rows: list[Measured], count: int, predictor: nn.Module, args: tuple[TokenState], scores: torch.Tensor
) -> None:
    """Measures one decision of a predictor."""
    assert isinstance(predictor, SpotPredictor)
    rows.append(measure(predictor, args[0], count))


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "a model with all its tokens")
    add_data(parser, "whose test images are used")
    parser.add_argument("--images", type=int, default=50)
    parser.add_argument("--policy", default="spot:0.7@4,7,10")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args(words)
    original = model_argument(arguments.model, "cpu", arguments.weights, arguments.trust).eval()
    family = family_of(original)
    test = splits_argument(original, arguments).test
    images = next(iter(test.take(arguments.images).batches(arguments.images))).images
    rows_of_stages: dict[int, list[Measured]] = {}
    for seed in arguments.seeds:
        # Attention and tokens are those of the pre-trained model; only the predictors are new.
        model = copy.deepcopy(original)
        # `realize_tokens_` draws the predictors from this seed.
        prescribed = TokenPrescription(parse_policy(arguments.policy), seed=seed)
        realize_tokens_(model, family, prescribed, "compress", reduction_heads(original))
        reduction = reduction_of(model)
        assert reduction is not None
        counts = reduction.policy.counts(reduction.shape.layout.patches)
        for stage, predictor in enumerate(reduction.stages):
            predictor.register_forward_hook(partial(watch, rows_of_stages.setdefault(stage, []), counts[stage]))
        with torch.no_grad():
            model(images)
    for stage, rows in rows_of_stages.items():
        # The mean over the seeds first, so that the interval is over images.
        shared, tokens, attention = (torch.stack(each).mean(0) for each in zip(*rows, strict=True))
        each = ", ".join(f"{float(row[0].mean()):.4f}" for row in rows)
        estimate = mean_estimate(shared.double(), seed=0)
        print(
            f"stage {stage + 1}: kept by both {estimate.value:.4f} [{estimate.low:.4f}, {estimate.high:.4f}] over "
            f"{len(images)} images (seeds: {each}); deviation over patches: token features {float(tokens.mean()):.3g}, "
            f"attention features {float(attention.mean()):.3g}"
        )
    return 0


def reduction_heads(model: nn.Module) -> int:
    """Returns the number of heads of the original model."""
    return max(len(layer.spec.heads) for layer in family_of(model).attention(model))


if __name__ == "__main__":
    sys.exit(main())
