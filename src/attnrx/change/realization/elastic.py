"""An elastic model: a folder with several sizes of one model, from which a model for any budget is loaded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.support.dataclass_records import fields_of, of_fields
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.storage import read_record, write_json
from attnrx.support.validation import FLAG, Integer, Items, Number, Optional, Record, Text
from attnrx.vit.models import family_of, load_model, model_fingerprint, reduction_of
from attnrx.vit.tokens import TokenPolicy

KIND, SCHEMA = "attnrx elastic model", 1
INDEX = "elastic.json"
ORIGINAL = "original"
# A size is loaded as it is for budgets up to this share above its own.
SAME = 1.01
HALVINGS = 20  # of the search for the number of tokens
MOST_SIZES = 1000
NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,100}")


def _require_name(text: str) -> None:
    # It is joined to the folder: a separator or ".." would lead out of it.
    if NAME.fullmatch(text) is None:
        raise InvalidInput("it must be the name of a folder of letters, digits and . _ + -")


SIZE = Record(
    {
        "name": Text(parse=_require_name),
        "macs": Number(0.0, 2.0),
        "params": Number(0.0, 2.0),
        "latency": Optional(Number(0.0, 100.0)),
        "divergence": Optional(Number(0.0)),
        "reduces_tokens": FLAG,
    },
    {"cuts": Items(Items(Number(0.0), 2, 2), 0, MOST_SIZES), "fingerprint": Text()},
)
RECORD = Record(
    {
        "sizes": Items(SIZE, 1, MOST_SIZES),
        "about": Record({}, {"macs": Integer(1), "params": Integer(1), "fingerprint": Text()}, open=True),
    }
)


@dataclass(frozen=True)
class Size:
    """One stored size: the name of its folder, its costs as shares of the original's, and its divergence from it.

    `latency` is relative to the model in its own library, under the conditions in `about["timing"]` of the elastic
    model; None where it was not measured. `cuts` are the MACs and the divergence of this size and of the same with
    fewer tokens, down to the MACs of the next smaller size, all on the same images. `fingerprint` is that of the size's
    weights; folders of earlier versions lack it.
    """

    name: str
    macs: float
    params: float
    latency: float | None = None
    divergence: float | None = None
    reduces_tokens: bool = True
    cuts: tuple[tuple[float, float], ...] = ()
    fingerprint: str | None = None

    def divergence_at(self, macs: float) -> float | None:
        """Returns the divergence of this size at a share of the MACs: at its own or more its own, at fewer that of its
        cuts, interpolated linearly; None where it is not known.
        """
        if self.name == ORIGINAL and macs >= self.macs:
            return 0.0
        if macs >= self.macs:
            return self.cuts[0][1] if self.cuts else self.divergence
        for (more, before), (fewer, after) in pairwise(self.cuts):
            if fewer <= macs <= more:
                return after + (before - after) * (macs - fewer) / max(more - fewer, 1e-9)
        return None

    def __str__(self) -> str:
        speed = "" if self.latency is None else f", {1 / self.latency:.2f}x the speed"
        far = "" if self.divergence is None else f", divergence {self.divergence:.4f}"
        return (
            f"{self.name}: {100 * self.macs:.1f} % of the MACs, {100 * self.params:.1f} % of the parameters{speed}{far}"
        )


@dataclass(frozen=True)
class Elastic:
    """Several sizes of one model in a folder, each an ordinary saved model, and the original.

    `load` returns the model for a budget: the stored size, or the larger one with fewer tokens, that diverges least.
    The weights of a size are those that were repaired for it, so sizes do not share them; the token policy has no
    weights and takes any value in between.
    """

    folder: Path
    sizes: tuple[Size, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path | str) -> "Elastic":
        """Reads the index of the folder; raises CheckpointError if there is none or it is damaged."""
        path = Path(folder) / INDEX
        record = read_record(path, KIND, SCHEMA, RECORD)
        return cls(Path(folder), tuple(of_fields(Size, size) for size in record["sizes"]), record["about"])

    def write(self) -> Path:
        """Writes the index; the sizes are in the folder already."""
        return write_json(self.folder / INDEX, self.to_record())

    def to_record(self) -> dict[str, Any]:
        """Returns the content of the index."""
        sizes = [
            {name: value for name, value in fields_of(size).items() if name != "fingerprint" or value is not None}
            for size in self.sizes
        ]
        return {"kind": KIND, "schema": SCHEMA, "sizes": sizes, "about": dict(self.about)}

    def __repr__(self) -> str:
        return "\n".join((f"Elastic({str(self.folder)!r})", *map(str, self.sizes)))

    def load(self, quantity: str, limit: float, **given: Any) -> nn.Module:
        """Returns the model that costs at most the share `limit` of the original's `quantity`: macs, params or latency.

        Latency is interpolated linearly in the MACs between the stored sizes; tokens do not change the parameters, so a
        budget of parameters takes a stored size. `given` are arguments of `load_model`.

        Raises:
            NotSupported: No size is small enough, or the latency was not measured.
        """
        if quantity == "params":
            fitting = [size for size in self.sizes if size.params <= limit]
            if not fitting:
                raise self._too_small(quantity, limit)
            # That of the least divergence, or the most costly one where that was not measured for all.
            known = all(size.divergence is not None or size.name == ORIGINAL for size in fitting)
            return self.model_of(
                min(fitting, key=lambda size: (known and (size.divergence or 0.0), -size.params)), **given
            )
        sizes, macs = (self.sizes, limit) if quantity == "macs" else self._as_fast_as(limit)
        for size in self._candidates(macs, sizes):
            model = self.model_of(size, **given)
            # The MACs of the original, without loading it.
            original_macs = family_of(model).costs(model).macs / size.macs
            is_own = size.macs <= macs <= SAME * size.macs
            # Smaller than requested is the last resort: such a size is returned even if its tokens cannot be changed.
            if is_own or fit_tokens_(model, macs * original_macs) or size.macs <= macs:
                return model
        raise self._too_small(quantity, limit)

    def model_of(self, size: Size, **given: Any) -> nn.Module:
        """Loads a size, and checks that it is the model of its entry.

        Raises:
            CheckpointError: The folder of the size has another model: it was swapped with another one, or replaced.
        """
        path = self.folder / size.name
        model = load_model(path, **given)
        fingerprint, costs = model_fingerprint(model), family_of(model).costs(model)
        pairs: list[tuple[str, Any, Any]] = [("fingerprint", fingerprint, size.fingerprint)]
        if size.name == ORIGINAL:
            pairs.append(("fingerprint", fingerprint, self.about.get("fingerprint")))
        # The token policy is no weight, but changes the MACs; an index of an earlier version lacks the original's.
        if "macs" in self.about:
            pairs.append(("MACs", costs.macs, round(size.macs * self.about["macs"])))
        for name, found, expected in pairs:
            if expected is not None and found != expected:
                raise CheckpointError(
                    f"{path} is not the model that {INDEX} describes ({name} {found}, not {expected}): it was replaced "
                    "or renamed. Put it back, or make the sizes again with attnrx.elastic."
                )
        return model

    def _candidates(self, macs: float, sizes: Sequence[Size]) -> Iterator[Size]:
        """Yields the sizes that can meet a budget of MACs: the size of these MACs, then by their divergence there.

        Without measured divergences: the larger ones, with fewer tokens, from the smallest on, then the smaller ones.
        """

        def order(size: Size) -> tuple[bool, bool, float, bool, float]:
            is_own, far = size.macs <= macs <= SAME * size.macs, size.divergence_at(macs)
            return not is_own, far is None, far or 0.0, size.macs < macs, abs(size.macs - macs)

        yield from sorted((size for size in sizes if size.macs <= macs or size.reduces_tokens), key=order)

    def _as_fast_as(self, latency: float) -> tuple[list[Size], float]:
        """Returns the timed sizes, each of which is faster than all with more MACs, and the share of the MACs at a
        share of the latency.
        """
        timed = [(size.macs, size.latency, size) for size in self.sizes if size.latency is not None]
        if len(timed) < 2:
            raise NotSupported(f"{self.folder}: the latency of its sizes was not measured; give macs or params.")
        fastest: list[tuple[float, float, Size]] = []  # slowest first
        for each in sorted(timed, key=lambda each: each[0], reverse=True):
            fastest += [each] * (not fastest or each[1] < fastest[-1][1])
        sizes = [size for *_, size in fastest]
        # Piecewise linear through the stored sizes, which were timed in turns; beyond the largest there is nothing to
        # gain.
        if latency >= fastest[0][1]:
            return sizes, fastest[0][0]
        for (more_macs, slow, _), (fewer_macs, fast, _) in pairwise(fastest):
            if fast <= latency:
                return sizes, fewer_macs + (more_macs - fewer_macs) * (latency - fast) / max(slow - fast, 1e-9)
        raise self._too_small("latency", latency)

    def _too_small(self, quantity: str, limit: float) -> NotSupported:
        sizes = "\n".join(map(str, self.sizes))
        return NotSupported(
            f"{self.folder} has no size with {limit:.3g} of the original's {quantity}. It has\n{sizes}\nRequest more, "
            "or make a smaller size with attnrx.elastic."
        )


def is_elastic(folder: Path | str) -> bool:
    return (Path(folder) / INDEX).is_file()


def fit_tokens_(model: nn.Module, limit: float) -> bool:
    """Changes the numbers of tokens of the model's policy, in place, so that it costs at most `limit` MACs, and hardly
    less.

    The shares of pruned patches of all stages are multiplied by one factor. Returns False, with the model unchanged,
    where the model has no policy, or no factor reaches the budget.
    """
    reduction, family = reduction_of(model), family_of(model)
    if reduction is None or not reduction.policy.drops:
        return False
    policy, patches = reduction.policy, reduction.shape.layout.patches

    def macs(factor: float) -> int:
        reduction.use_policy_(scaled(policy, factor))
        return family.costs(model).macs

    # At the largest factor one patch remains after the last stage. `high` fits the budget at every step, so the result
    # does.
    low, high = 0.0, (1 - 1 / patches) / (1 - policy.keep[-1])
    if macs(high) > limit:
        reduction.use_policy_(policy)
        return False
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if macs(middle) > limit else (low, middle)
    reduction.use_policy_(scaled(policy, high))
    return True


def scaled(policy: TokenPolicy, factor: float) -> TokenPolicy:
    """Returns the policy with the share of pruned patches after every stage multiplied by the factor."""
    keep = tuple(max(1 - factor * (1 - share), 1e-6) for share in policy.keep)  # a keep ratio of 0 is invalid
    return replace(policy, keep=keep, num_pruned=None)
