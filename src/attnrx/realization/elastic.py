"""An elastic model: a folder with several sizes of one model, from which a model for any budget is loaded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.errors import NotSupported
from attnrx.models import family_of, load_model, reduction_of
from attnrx.serialization.storage import check_schema, read_json, write_json
from attnrx.serialization.validation import JSON_OBJECT, Choice, Flag, Items, Number, Optional, Record, Text, validated
from attnrx.tokens import TokenPolicy

KIND, SCHEMA = "attnrx elastic model", 1
INDEX = "elastic.json"
ORIGINAL = "original"
# A size is loaded as it is for budgets up to this share above its own.
SAME = 1.01
HALVINGS = 20  # of the search for the number of tokens

SIZE = Record(
    {
        "name": Text(),
        "macs": Number(0.0, 2.0),
        "params": Number(0.0, 2.0),
        "latency": Optional(Number(0.0, 100.0)),
        "divergence": Optional(Number(0.0)),
        "reduces_tokens": Flag(),
    }
)
RECORD = Record(
    {
        "kind": Choice((KIND,)),
        "schema": Choice((SCHEMA,)),
        "sizes": Items(SIZE),
        "about": JSON_OBJECT,
    }
)


@dataclass(frozen=True)
class Size:
    """One stored size: the name of its folder, its costs as shares of the original's, and its divergence from it.

    `latency` is relative to the model in its own library, under the conditions in `about["timing"]` of the elastic
    model; None where it was not measured.
    """

    name: str
    macs: float
    params: float
    latency: float | None = None
    divergence: float | None = None
    reduces_tokens: bool = True

    def __str__(self) -> str:
        speed = "" if self.latency is None else f", {1 / self.latency:.2f}x the speed"
        far = "" if self.divergence is None else f", divergence {self.divergence:.4f}"
        return (
            f"{self.name}: {100 * self.macs:.1f} % of the MACs, {100 * self.params:.1f} % of the parameters{speed}{far}"
        )


@dataclass(frozen=True)
class Elastic:
    """Several sizes of one model in a folder, each an ordinary saved model, and the original.

    `load` returns the model for a budget: a stored size, or the next larger one with fewer tokens. The weights of a
    size are those that were repaired for it, so sizes do not share them; the token policy has no weights and takes any
    value in between.
    """

    folder: Path
    sizes: tuple[Size, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path | str) -> "Elastic":
        """Reads the index of the folder; raises CheckpointError if there is none or it is damaged."""
        path = Path(folder) / INDEX
        record = read_json(path)
        check_schema(record, KIND, SCHEMA, path)
        validated(record, RECORD, path)
        return cls(Path(folder), tuple(Size(**size) for size in record["sizes"]), record["about"])

    def write(self) -> Path:
        """Writes the index; the sizes are in the folder already."""
        return write_json(self.folder / INDEX, self.to_record())

    def to_record(self) -> dict[str, Any]:
        """Returns the content of the index."""
        sizes = [asdict(size) for size in self.sizes]
        return {"kind": KIND, "schema": SCHEMA, "sizes": sizes, "about": dict(self.about)}

    def __repr__(self) -> str:
        return "\n".join((f"Elastic({str(self.folder)!r})", *map(str, self.sizes)))

    def load(self, of: str, most: float, **given: Any) -> nn.Module:
        """Returns the model that costs at most the share `most` of the original's `of`: macs, params or latency.

        Latency is interpolated linearly in the MACs between the stored sizes; tokens do not change the parameters, so a
        budget of parameters takes a stored size. `given` are arguments of `load_model`.

        Raises:
            NotSupported: No size is small enough, or the latency was not measured.
        """
        if of == "params":
            largest = max(
                (size for size in self.sizes if size.params <= most), key=lambda size: size.params, default=None
            )
            if largest is None:
                raise self._too_small(of, most)
            return load_model(self.folder / largest.name, **given)
        sizes = self.sizes if of == "macs" else self._fastest()
        macs = most if of == "macs" else self._macs_for(most, sizes)
        for size in self._candidates(macs, sizes):
            model = load_model(self.folder / size.name, **given)
            # The MACs of the original, without loading it.
            original_macs = family_of(model).costs(model).macs / size.macs
            is_own = size.macs <= macs <= SAME * size.macs
            # Smaller than requested is the last resort: such a size is returned even if its tokens cannot be changed.
            if is_own or fit_tokens_(model, macs * original_macs) or size.macs <= macs:
                return model
        raise self._too_small(of, most)

    def _fastest(self) -> tuple[Size, ...]:
        """Returns the timed sizes, each of which is faster than all with more MACs."""
        fastest, least = [], math.inf
        for size in sorted(self.sizes, key=lambda size: size.macs, reverse=True):
            if size.latency is not None and size.latency < least:
                least = size.latency
                fastest.append(size)
        return tuple(fastest)

    def _candidates(self, macs: float, sizes: Sequence[Size]) -> Iterator[Size]:
        """Yields the size of these MACs, then those to be reduced further, then those to be reduced less."""
        order = sorted(sizes, key=lambda size: size.macs)
        yield from (size for size in order if size.macs <= macs <= SAME * size.macs)
        # A larger size with fewer tokens diverges less than a smaller one with more, whose weights have lost more
        # (docs/results/plan.md, "budgets between two plans").
        yield from (size for size in order if size.macs > macs and size.reduces_tokens)
        yield from (size for size in reversed(order) if size.macs <= macs)

    def _macs_for(self, latency: float, sizes: Sequence[Size]) -> float:
        """Returns the share of the MACs at a share of the latency, by linear interpolation."""
        # Piecewise linear through the stored sizes, which were timed in turns; beyond the largest there is nothing to
        # gain.
        timed = sorted((size.latency, size.macs) for size in sizes if size.latency is not None)
        if sum(size.latency is not None for size in self.sizes) < 2:
            raise NotSupported(f"{self.folder}: the latency of its sizes was not measured; give macs or params.")
        if latency >= timed[-1][0]:
            return timed[-1][1]
        for (fast, fewer_macs), (slow, more_macs) in pairwise(timed):
            if fast <= latency <= slow:
                return fewer_macs + (more_macs - fewer_macs) * (latency - fast) / max(slow - fast, 1e-9)
        raise self._too_small("latency", latency)

    def _too_small(self, of: str, most: float) -> NotSupported:
        sizes = "\n".join(map(str, self.sizes))
        return NotSupported(
            f"{self.folder} has no size with {most:.3g} of the original's {of}. It has\n{sizes}\nRequest more, or make "
            "a smaller size with attnrx.elastic."
        )


def is_elastic(folder: Path | str) -> bool:
    return (Path(folder) / INDEX).is_file()


def fit_tokens_(model: nn.Module, most: float) -> bool:
    """Changes the numbers of tokens of the model's policy, in place, so that it costs at most `most` MACs, and hardly
    less.

    The shares of pruned patches of all stages are multiplied by one factor. Returns False, with the model unchanged,
    where the model has no policy of fixed numbers, or no factor reaches the budget.
    """
    reduction, family = reduction_of(model), family_of(model)
    if reduction is None or reduction.policy.by_image or not reduction.policy.drops:
        return False
    policy, patches = reduction.policy, reduction.shape.layout.patches

    def macs(factor: float) -> int:
        reduction.use_policy_(scaled(policy, factor))
        return family.costs(model).macs

    # At the largest factor one patch remains after the last stage. `high` fits the budget at every step, so the result
    # does.
    low, high = 0.0, (1 - 1 / patches) / (1 - policy.keep[-1])
    if macs(high) > most:
        reduction.use_policy_(policy)
        return False
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if macs(middle) > most else (low, middle)
    reduction.use_policy_(scaled(policy, high))
    return True


def scaled(policy: TokenPolicy, factor: float) -> TokenPolicy:
    """Returns the policy with the share of pruned patches after every stage multiplied by the factor."""
    keep = tuple(max(1 - factor * (1 - share), 1e-6) for share in policy.keep)  # a keep ratio of 0 is invalid
    return replace(policy, keep=keep, num_pruned=None)
