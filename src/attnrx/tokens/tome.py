"""ToMe: the patches that are most alike become one."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attnrx.shapes import Bool, Float, Int, Tensor
from attnrx.tokens.reducer import Reducer, Reduction, Shape
from attnrx.tokens.seen import Seen


@dataclass(frozen=True)
class ToMe(Reducer):
    """Merges the most similar patches by bipartite soft matching (Bolya et al., 2023), written from the paper.

    Patches are divided by turns into two sets; every patch of the first proposes to the most similar of the second
    (cosine of the mean keys over the heads), and the best proposals are merged into means weighted by size. Later
    attention is proportional. A round merges one of the sets at most; where more must go, rounds follow, by the means
    of the merged patches' keys, weighted by size. As published a little is merged in every layer, between attention
    and MLP, never more than a round; here it is before a layer (`tome:N@every` is nearest to that).
    """

    proportional: ClassVar[bool] = True

    @property
    def needs(self) -> tuple[str, ...]:
        """What of the layers before it must see."""
        return ("keys",)

    def predictor_macs(self, shape: Shape, patches: int, count: int) -> int:
        """MACs of comparing the two sets by their keys, in every round."""
        total = 0
        while patches > count:
            second = patches // 2
            total += (patches - second) * second * shape.directions
            patches -= min(patches - second, patches - count)
        return total

    def reduce(self, seen: Seen, count: int, predictor: nn.Module) -> Reduction:
        """Merges until `count` are left."""
        assert seen.keys is not None
        there, sizes = seen.there > 0, seen.sizes[:, seen.prefix :]
        patches, keys = seen.patches, seen.keys[:, seen.prefix :]
        present = seen.present
        while present > count:
            sources, goals = proposals(keys, there, present, present - count)
            grown = sizes.scatter_add(1, goals, sizes.gather(1, sources))
            patches, keys = (_merged(table, sizes, grown, sources, goals) for table in (patches, keys))
            sizes, there = grown, there.scatter(1, sources, False)
            present -= sources.shape[1]
        kept = _places(there, present)
        return Reduction(kept, _rows(patches, kept), sizes=sizes.gather(1, kept))


def proposals(
    keys: Float[Tensor, "batch patches directions"], there: Bool[Tensor, "batch patches"], present: int, most: int
) -> tuple[Int[Tensor, "batch merged"], Int[Tensor, "batch merged"]]:
    """Gives the patches that one round merges, `most` or all of the first set, and those they are merged into."""
    places = _places(there, present)
    first, second = places[:, 0::2], places[:, 1::2]
    unit = nn.functional.normalize(keys, dim=-1)
    closeness, nearest = (_rows(unit, first) @ _rows(unit, second).transpose(1, 2)).max(-1)
    leaving = closeness.argsort(dim=1, descending=True, stable=True)[:, :most]
    return first.gather(1, leaving), second.gather(1, nearest.gather(1, leaving))


def _merged(table: Tensor, sizes: Tensor, grown: Tensor, sources: Tensor, goals: Tensor) -> Tensor:
    weighed = table * sizes[..., None]
    gone = _rows(weighed, sources)
    return weighed.scatter_add(1, goals[..., None].expand_as(gone), gone) / grown.clamp_min(1)[..., None]


def _places(there: Tensor, present: int) -> Tensor:
    return there.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :present]


def _rows(table: Float[Tensor, "batch rows width"], chosen: Tensor) -> Tensor:
    return table.gather(1, chosen[..., None].expand(-1, -1, table.shape[2]))
