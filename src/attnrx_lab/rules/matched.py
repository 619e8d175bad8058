"""Controls for a rule, which keep as many directions per head or layer as the rule, but choose other directions."""

import hashlib
from dataclasses import dataclass

import torch

from attnrx.decide.rules.rule import Rule, keep_only, largest, learned_spectrum, rank_positions
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.prescription import Basis, ScoreDecision
from attnrx.support.errors import NotSupported
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.spec import Spectrum


@dataclass(frozen=True)
class RandomMatched(Rule):
    """Keeps as many directions of each head as `rule` does, but draws them at random.

    A random draw depends only on the seed, the layer and the head's index in the original model. The control does not
    change strengths, even if `rule` changes them.

    If all heads already share their directions, the control applies the same random permutation to every head's
    selection of directions. So the total number of directions and the number in every head stay the same. If `rule`
    creates shared directions, the control draws the same number of the heads' own directions at random, and stores them
    in the same shared form.
    """

    rule: Rule
    seed: int = 0

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = diagnosis.layers[layer].spectrum, self.rule.decide(diagnosis, layer)
        notes = ["drawn at random"] * len(spectrum.heads)
        if matched.is_shared:
            return self._shared(spectrum, matched, layer)
        if spectrum.shared:
            # All heads have the same permutation, so the layer and every head keep the same number of directions.
            order = self._draw(f"{self.seed}/{layer}", matched.keep.shape[1]).argsort()
            return keep_only(spectrum, matched.keep[:, order], notes)
        scores = torch.zeros(spectrum.strength.shape, dtype=torch.float64)
        for row, head in zip(scores, spectrum.heads, strict=True):
            row.copy_(self._draw(f"{self.seed}/{layer}/{head}", len(row)))
        return keep_only(spectrum, largest(scores, spectrum.used, matched.keep.sum(-1)), notes)

    def _shared(self, spectrum: Spectrum, matched: ScoreDecision, layer: int) -> ScoreDecision:
        """Draws as many directions at random as `matched` shares. Only the head that a direction came from uses it."""
        heads, directions = spectrum.strength.shape
        rank, used_indices = matched.keep.shape[1], torch.nonzero(spectrum.used.flatten()).flatten()
        sample = used_indices[self._draw(f"{self.seed}/{layer}", len(used_indices)).argsort()[:rank].sort().values]
        # A basis row selects one row of the stacked heads. If there are fewer than `rank` rows, the last rows are zero.
        rows = torch.zeros(1, rank, heads * directions, dtype=torch.float64)
        rows[0, torch.arange(len(sample)), sample] = 1.0
        strength = torch.zeros(heads, rank, dtype=torch.float64)
        strength[sample // directions, torch.arange(len(sample))] = spectrum.strength.flatten()[sample].double()
        why = f"shares {rank} directions with all heads of the layer (drawn at random)"
        if matched.basis is None or matched.basis.blocks is None:
            return ScoreDecision(matched.keep, strength, (why,) * heads, Basis(rows, rows, shared=True))
        # In blocks the strengths are part of the rows. Head h uses only block h, with strength 1. Zero rows belong to
        # the last block.
        owner = torch.full((rank,), heads - 1)
        owner[: len(sample)] = sample // directions
        blocks = tuple(torch.bincount(owner, minlength=heads).tolist())
        basis = Basis(strength.sum(0)[:, None] * rows, rows, shared=True, blocks=blocks)
        return ScoreDecision(matched.keep, torch.eye(heads, dtype=torch.float64)[:, owner], (why,) * heads, basis)

    def _draw(self, key: str, count: int) -> Float[Tensor, "directions"]:
        # Python's `hash` would differ between processes. Seven bytes are always a valid torch seed.
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
        return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class LargestMatched(Rule):
    """Removes as many directions of each head as `rule` does, but the strongest ones.

    If the strengths rank directions correctly, this control degrades the model more than `rule`. The control needs
    learned strengths and does not change them.

    Raises:
        NotSupported: `decide` raises it if heads share directions.
    """

    rule: Rule

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = _own_directions(self, self.rule, diagnosis, layer)
        num_removed = spectrum.used.sum(-1) - matched.keep.sum(-1)
        keep = rank_positions(spectrum.strength.abs(), spectrum.used) >= num_removed[:, None]
        return keep_only(spectrum, keep, ["the weakest"] * len(spectrum.heads))


@dataclass(frozen=True)
class UniformMatched(Rule):
    """Keeps as many directions in each layer as `rule` does, but gives all heads the same rank.

    Comparing `rule` with this control shows the benefit of choosing a rank per head. Each head keeps its strongest
    directions. If the total is not divisible by the number of heads, the heads whose next direction is strongest keep
    one more. If a head has too few directions, the other heads keep more. The control needs learned strengths and does
    not change them.

    Raises:
        NotSupported: `decide` raises it if heads share directions.
    """

    rule: Rule

    def decide(self, diagnosis: Diagnosis, layer: int) -> ScoreDecision:
        spectrum, matched = _own_directions(self, self.rule, diagnosis, layer)
        strength = spectrum.strength.abs()
        # Each round takes the strongest remaining direction of every head, and orders the heads by its strength.
        rounds = rank_positions(strength, spectrum.used)
        candidates = sorted(
            (rounds[head, direction].item(), -strength[head, direction].item(), head)
            for head, direction in torch.nonzero(spectrum.used).tolist()
        )
        head_of = torch.tensor([head for _, _, head in candidates[: sum(matched.ranks)]], dtype=torch.long)
        ranks = torch.bincount(head_of, minlength=len(strength))
        keep = largest(strength, spectrum.used, ranks)
        return keep_only(spectrum, keep, ["the same rank in every head"] * len(spectrum.heads))


def _own_directions(control: Rule, rule: Rule, diagnosis: Diagnosis, layer: int) -> tuple[Spectrum, ScoreDecision]:
    """Returns the layer's spectrum and the decision of `rule`. Raises NotSupported if all heads share directions."""
    spectrum, matched = learned_spectrum(control, diagnosis, layer), rule.decide(diagnosis, layer)
    if spectrum.shared or matched.is_shared:
        raise NotSupported(f"{control} ranks the directions of every head, and these are shared; use random_matched.")
    return spectrum, matched
