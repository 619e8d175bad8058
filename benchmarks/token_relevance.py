"""Measures how reliable the relevance of patches is across layers, across methods and under noise (SPOT, Section 8).

    python benchmarks/token_relevance.py timm:vit_tiny_patch16_224 --data imagenette --images 200 --out relevance.json

The script runs a model with all its tokens, and copies of the model with several token reducers. It measures how well
the relevance in two layers agrees, and what share of the patches two reducers both keep. It also adds Gaussian noise to
the image, and measures how the relevance in one layer and the mean relevance over the layers so far change. Results are
means over images with 95 % bootstrap intervals. To include a trained predictor, pass --also NAME=FOLDER, where FOLDER
is a saved model with the same stages.
"""

import argparse
import copy
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import torch
from torch import nn

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.data import ImageSet
from attnrx.show.checks.statistics import mean_estimate
from attnrx.support.errors import AttnrxError, InvalidInput
from attnrx.support.estimate import Estimate
from attnrx.support.modules import evaluating
from attnrx.support.shapes import Bool, Float, Tensor
from attnrx.support.storage import write_json
from attnrx.vit.attention import Observation
from attnrx.vit.costs import device_name
from attnrx.vit.models import attach_tokens_, family_of, model_fingerprint, observing, reduction_of
from attnrx.vit.tokens import REDUCERS, TokenLayout, TokenPolicy, parse_policy
from attnrx.vit.tokens.reducer import best
from attnrx_lab.clutter import patches_left
from attnrx_lab.perturbation import noise_like

Row = dict[str, object]
Relevance = Mapping[str, torch.Tensor]


CLASS_ATTENTION, RECEIVED = "class_attention", "attention_received"


class RelevanceWatch:
    """Stores the relevance of every patch in every layer, averaged over the heads, for all images that the model sees.

    "class_attention" is the attention from the class token to a patch, if there is a class token. "attention_received"
    is the attention from all tokens. If no token is pruned, these numbers are the scores of the reducers with the same
    names.
    """

    def __init__(self, layout: TokenLayout, depth: int):
        self.layout, self.depth = layout, depth
        self._seen: dict[str, list[list[Tensor]]] = defaultdict(lambda: [[] for _ in range(depth)])

    def observe(self, layer: int, observation: Observation) -> None:
        # [batch, heads, queries, patches], where the class token is query 0.
        maps = observation.attention[..., self.layout.prefix :].detach()
        if self.layout.class_token:
            # Every batch moves to the CPU, because memory grows with the images.
            self._seen[CLASS_ATTENTION][layer].append(maps[:, :, 0].mean(1).double().cpu())
        self._seen[RECEIVED][layer].append(maps.sum(2).mean(1).double().cpu())

    def relevance(self) -> dict[str, Float[Tensor, "images layers patches"]]:
        """Returns the relevance by source, with NaN for a layer that computed nothing."""
        by_source = {}
        for name, layers in self._seen.items():
            # A layer without heads observes nothing, so its rows take their shape from another layer.
            observed_layer = next(torch.cat(batches) for batches in layers if batches)
            by_source[name] = torch.stack(
                [torch.cat(parts) if parts else observed_layer * torch.nan for parts in layers], dim=1
            )
        return by_source


def running_mean(relevance: Float[Tensor, "*more layers patches"]) -> Float[Tensor, "*more layers patches"]:
    """Returns the mean over layers 1..l for every l (SPOT, Section 8), without layers whose relevance is NaN."""
    is_observed = ~relevance.isnan()
    return relevance.nan_to_num(0.0).cumsum(-2) / is_observed.cumsum(-2)


def token_relevance(
    model: nn.Module, images: Float[Tensor, "images channels height width"]
) -> dict[str, Float[Tensor, "images layers patches"]]:
    """Returns the relevance of every patch in each layer, by source (see `RelevanceWatch`).

    The images must be normalized. They run through the model as one batch.

    Raises:
        InvalidInput: The model prunes or merges tokens.
    """
    if reduction_of(model) is not None:
        raise InvalidInput(
            "this model prunes or merges tokens, so its layers have different patches; give the original."
        )
    family, weight = family_of(model), next(model.parameters())
    watch = RelevanceWatch(family.token_layout(model), len(family.attention(model)))
    with evaluating([model]), observing(model, family, watch.observe):
        model(images.to(weight.device, weight.dtype))
    return watch.relevance()


def kept(relevance: Float[Tensor, "*more patches"], count: int) -> Bool[Tensor, "*more patches"]:
    """Returns the patches that a reducer keeps: the `count` patches with the highest relevance, the first on ties."""
    flat = relevance.reshape(-1, relevance.shape[-1])
    selected = best(flat, torch.ones_like(flat), count)
    return torch.zeros_like(flat, dtype=torch.bool).scatter(1, selected, True).view(relevance.shape)


def overlap(first: Bool[Tensor, "*more patches"], second: Bool[Tensor, "*more patches"]) -> Float[Tensor, "*more"]:
    """Returns the share of the smaller set's patches that are in both sets.

    For random sets, the expected overlap is the share of all patches that the larger set contains.
    """
    smaller = torch.minimum(first.sum(-1), second.sum(-1)).clamp_min(1)
    return (first & second).sum(-1).double() / smaller


def rank_correlation(
    first: Float[Tensor, "*more patches"], second: Float[Tensor, "*more patches"]
) -> Float[Tensor, "*more"]:
    """Returns Spearman's correlation over the patches, in [-1, 1], or 0 if all patches of one side are equal."""
    ranks = (_ranks(first), _ranks(second))
    one, other = (each - each.mean(-1, keepdim=True) for each in ranks)
    size = one.norm(dim=-1) * other.norm(dim=-1)
    # The correlation is zero if one side is constant, because a constant side orders no patch before another.
    return torch.where(size > 0, (one * other).sum(-1) / size.clamp_min(torch.finfo(size.dtype).tiny), 0.0)


def noise_to_spread(draws: Float[Tensor, "draws *more patches"]) -> Float[Tensor, "*more"]:
    """Returns the variance of relevance over draws of noise, relative to its variance over the patches.

    Both variances are unbiased. Noise also adds to the variance of the mean over the draws, so the function subtracts
    this part from the variance over the patches. The result is infinite if no difference between patches remains.
    """
    # The variance of a mean of n draws is the variance of one draw, divided by n.
    noise = noise_variance(draws)
    spread = draws.mean(0).var(-1) - noise / len(draws)
    return torch.where(spread > 0, noise / spread, torch.inf)


def noise_variance(draws: Float[Tensor, "draws *more patches"]) -> Float[Tensor, "*more"]:
    """Returns the variance of relevance over draws of noise, averaged over the patches."""
    return draws.var(0).mean(-1)


def noise_correlation(draws: Float[Tensor, "draws images layers patches"]) -> Float[Tensor, "images layers layers"]:
    """Returns the correlation of the noise of every two layers, over draws and patches, about the mean of the draws.

    SPOT's Section 8 assumes that this correlation is near zero off the diagonal.
    """
    # Centred for each image, layer and patch, because only differences between draws are noise.
    deviations = (draws - draws.mean(0)).permute(1, 2, 0, 3).flatten(2)
    products = deviations @ deviations.mT
    own = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (own[:, :, None] * own[:, None, :]).clamp_min(torch.finfo(draws.dtype).tiny)


def averaging_shares(draws: Float[Tensor, "draws images layers patches"]) -> dict[str, Tensor]:
    """Returns the share of layer l's noise variance that remains in the mean over layers 1..l, [images, layers].

    The returned mapping has three versions of this share. "measured" is the measured share. "independent" assumes that
    the layers' noise has the measured variances but no correlation. "claimed" is 1 / l, which SPOT's Section 8 derives
    from equal variances.
    """
    each = noise_variance(draws)
    counts = torch.arange(1, each.shape[-1] + 1, dtype=each.dtype)
    return {
        "measured": noise_variance(running_mean(draws)) / each,
        "independent": each.cumsum(-1) / counts.square() / each,
        "claimed": (1 / counts).expand_as(each),
    }


def _ranks(values: Float[Tensor, "*more patches"]) -> Float[Tensor, "*more patches"]:
    """Returns the ranks in ascending order. Equal values share the mean of their ranks."""
    ordered = values.contiguous().sort(-1).values
    # The rank is the mean of the first and the last index of equal values.
    low = torch.searchsorted(ordered, values.contiguous(), right=False)
    high = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (low + high - 1).double() / 2


def agreement_of_layers(relevance: Relevance, policy: TokenPolicy, seed: int) -> Iterator[Row]:
    """Compares every two layers by rank, and the patches that a stage keeps with the patches that later layers would
    keep.
    """
    for source, maps in relevance.items():
        depth = maps.shape[1]
        # [images] for each pair of layers. Pairs with the same distance are averaged for each image.
        every = {pair: rank_correlation(maps[:, pair[0]], maps[:, pair[1]]) for pair in combinations(range(depth), 2)}
        for distance in range(1, depth):
            correlation = torch.stack([value for (low, high), value in every.items() if high - low == distance]).mean(0)
            row = {"source": source, "what": "rank correlation", "layers apart": distance}
            yield {**row, **summary(correlation, seed)}
        yield from foresight(source, maps, policy, seed)


def foresight(source: str, maps: torch.Tensor, policy: TokenPolicy, seed: int) -> Iterator[Row]:
    """Compares the patches that a stage keeps with the patches that the mean over all later layers would keep."""
    counts, mean = policy.counts(maps.shape[2]), running_mean(maps)
    for layer, count in zip(policy.layers, counts, strict=True):
        # Only layers after the stage count, because a reducer at this stage has to predict their relevance.
        later = kept(maps[:, layer - 1 :].mean(1), count)
        for name, state in {"one layer": maps, "mean over layers": mean}.items():
            shared = overlap(kept(state[:, layer - 2], count), later)
            chance = count / maps.shape[2]
            row = {"source": source, "what": "kept by later layers too", "before layer": layer, "by": name}
            yield {**row, "chance": chance, **summary(shared, seed)}


def agreement_of_methods(sets: Mapping[str, torch.Tensor], policy: TokenPolicy, seed: int) -> Iterator[Row]:
    """Compares the patches that every two reducers keep, stage by stage."""
    for first, second in combinations(sets, 2):
        for stage, layer in enumerate(policy.layers):
            shared = overlap(sets[first][:, stage], sets[second][:, stage])
            # For random sets, the expected `overlap` is the share of all patches that the larger set contains.
            chance = torch.maximum(*(sets[name][:, stage].double().mean() for name in (first, second)))
            yield {"methods": [first, second], "before layer": layer, "chance": float(chance), **summary(shared, seed)}


def stability(clean: Relevance, noisy: Mapping[str, torch.Tensor], policy: TokenPolicy, seed: int) -> Iterator[Row]:
    """Compares how noise changes the relevance in layer l and its mean over layers 1..l, for l before each stage."""
    for source, draws in noisy.items():
        averaged, shares = running_mean(draws), averaging_shares(draws)
        of_draws, of_layers = noise_to_spread(draws), noise_to_spread(averaged)
        correlation = noise_correlation(draws)
        for layer, count in zip(policy.layers, policy.counts(draws.shape[-1]), strict=True):
            at = layer - 2  # the index of the layer before the stage, because layers count from 1
            pairs = correlation[:, : at + 1, : at + 1]  # only the layers in the mean
            kept_again = {
                name: overlap(kept(before[:, at], count).expand(len(after), -1, -1), kept(after[:, :, at], count)).mean(
                    0
                )
                for name, before, after in (
                    ("one layer", clean[source], draws),
                    ("mean over layers", running_mean(clean[source]), averaged),
                )
            }
            quantities = {
                "noise / spread, one layer": of_draws[:, at],
                "noise / spread, mean over layers": of_layers[:, at],
                "log ratio of the two": (of_layers[:, at] / of_draws[:, at]).log(),
                **{f"noise left, {name}": share[:, at] for name, share in shares.items()},
                "kept again, one layer": kept_again["one layer"],
                "kept again, mean over layers": kept_again["mean over layers"],
                "kept again, gain": kept_again["mean over layers"] - kept_again["one layer"],
                **({"noise correlation": off_diagonal(pairs)} if at else {}),  # the first layer has no pair
            }
            for what, value in quantities.items():
                yield {"source": source, "before layer": layer, "what": what, **summary(value, seed)}


def off_diagonal(correlation: torch.Tensor) -> torch.Tensor:
    """Returns the mean over pairs of different layers."""
    layers = correlation.shape[-1]
    return (correlation.sum((-2, -1)) - layers) / (layers * (layers - 1))  # the diagonal is 1 everywhere


def summary(values: torch.Tensor, seed: int) -> dict[str, float | int]:
    """Returns the mean over images with its interval. `n` counts the images with a finite value."""
    # `noise_to_spread` is infinite if noise leaves no difference between patches.
    finite = values[values.isfinite()]
    estimate = mean_estimate(finite, seed) if len(finite) else Estimate(*[float("nan")] * 3)
    return {**asdict(estimate), "n": len(finite)}


def noisy_relevance(model: nn.Module, data: ImageSet, arguments: argparse.Namespace, size: float) -> Relevance:
    """Returns the relevance under every draw of noise, [draws, images, layers, patches] by source."""
    relevance: dict[str, list[torch.Tensor]] = {}
    first = 0
    for batch in data.batches(arguments.batch_size):
        draws: dict[str, list[torch.Tensor]] = {}
        for draw in range(arguments.draws):
            # The noise depends on the index of the image, not on the batch size.
            noise = noise_like(batch.images, first, arguments.seed + draw)
            for source, maps in token_relevance(model, batch.images + size * noise).items():
                draws.setdefault(source, []).append(maps)
        for source, each in draws.items():
            relevance.setdefault(source, []).append(torch.stack(each))
        first += len(batch)
    return {source: torch.cat(parts, dim=1) for source, parts in relevance.items()}


def clean_relevance(model: nn.Module, data: ImageSet, arguments: argparse.Namespace) -> Relevance:
    """Returns the relevance of the images without noise."""
    batches = [token_relevance(model, batch.images) for batch in data.batches(arguments.batch_size)]
    return {source: torch.cat([maps[source] for maps in batches]) for source in batches[0]}


def reducing(model: nn.Module, policy: TokenPolicy, arguments: argparse.Namespace) -> dict[str, nn.Module]:
    """Returns a copy of the model for every reducer, and the models of --also."""
    layout = family_of(model).token_layout(model)
    models: dict[str, nn.Module] = {}
    for name in arguments.reducers:
        reducer = REDUCERS[name]()
        if reducer.learned:
            raise InvalidInput(f"{name} has a predictor that must be trained; give it with --also {name}=FOLDER.")
        # Without a class token, reducers that use its attention are omitted.
        if "class_attention" not in reducer.needs or layout.class_token:
            models[name] = copy.deepcopy(model)
            attach_tokens_(models[name], family_of(model), TokenPolicy(reducer, policy.layers, policy.keep))
    for text in arguments.also:
        name, _, folder = text.partition("=")
        models[name] = rx.load(folder).to(arguments.device).eval()  # it contains a token policy
        reduction = reduction_of(models[name])
        if reduction is None or (reduction.policy.layers, reduction.policy.keep) != (policy.layers, policy.keep):
            raise InvalidInput(f"--also {text}: its stages are not {arguments.stages}; give --stages that all share.")
    return models


def kept_sets(
    models: Mapping[str, nn.Module], data: ImageSet, arguments: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Returns the patches that every model keeps after each stage."""
    return {
        name: torch.cat([patches_left(model, batch.images) for batch in data.batches(arguments.batch_size)])
        for name, model in models.items()
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser, "a model without token reduction")
    add_data(parser, "whose test images are used")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--stages", default="0.7@4,7,10", help="RATIO@LAYER,LAYER,...")
    untrained = [name for name, reducer in REDUCERS.items() if not reducer().learned]
    parser.add_argument("--reducers", nargs="*", choices=REDUCERS, default=untrained)
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FOLDER", help="models with trained predictors")
    parser.add_argument("--noise", nargs="+", type=float, default=[0.05, 0.2, 0.5], help="in normalized images")
    parser.add_argument("--draws", type=int, default=6, help="draws of noise, two at least")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; all that torch takes if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None, help="JSON file for the results")
    return parser.parse_args(words)


def measure(model: nn.Module, data: ImageSet, arguments: argparse.Namespace) -> dict[str, list[Row]]:
    """Makes the three tables."""
    policy = parse_policy(f"random:{arguments.stages}")  # only its stages matter, so the reducer is arbitrary
    policy = policy.on(family_of(model).token_layout(model), len(family_of(model).attention(model)))
    models = reducing(model, policy, arguments)
    clean = clean_relevance(model, data, arguments)
    tables = {"layers": list(agreement_of_layers(clean, policy, arguments.seed))}
    tables["methods"] = list(agreement_of_methods(kept_sets(models, data, arguments), policy, arguments.seed))
    tables["noise"] = []
    for size in arguments.noise:
        noisy = noisy_relevance(model, data, arguments, size)
        tables["noise"] += [{"noise": size, **row} for row in stability(clean, noisy, policy, arguments.seed)]
    return tables


def line(row: Row) -> str:
    """Returns one row in words."""
    numbers = ("value", "low", "high", "n")
    words = ", ".join(f"{name} {value}" for name, value in row.items() if name not in (*numbers, "what"))
    return f"{row.get('what', 'kept by both')}: {row['value']:.4f} [{row['low']:.4f}, {row['high']:.4f}] ({words})"


def main(words: list[str] | None = None) -> int:
    """Runs the benchmark."""
    arguments = parse(words)
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    try:
        model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust).eval()
        test = splits_argument(model, arguments).test
        data = test.take(min(arguments.images, len(test)))
        tables = measure(model, data, arguments)
    except AttnrxError as error:
        sys.exit(str(error))
    for rows in tables.values():
        print(*(line(row) for row in rows), sep="\n")
    about = {
        "model": model_fingerprint(model),
        "data": data.fingerprint,
        "images": len(data),
        "stages": arguments.stages,
        "draws": arguments.draws,
        "seed": arguments.seed,
        "hardware": device_name(arguments.device),
        "torch": torch.__version__,
    }
    print(", ".join(f"{name}: {fact}" for name, fact in about.items()))
    if arguments.out:
        print(f"written to {write_json(arguments.out, {'benchmark': 'token relevance', **about, **tables})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
