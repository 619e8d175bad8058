"""The fusion experiment: which head uses which of the directions that all heads of a layer share (Figures 2 and 3)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from attnrx.decompositions import Canonical, Fusion, fusion_ranks
from attnrx.errors import InvalidInput
from attnrx.models import family_of
from attnrx.progress import Log, no_log
from attnrx.serialization.config import from_dict
from attnrx.serialization.storage import read_tensors
from attnrx.shapes import Float, Tensor
from attnrx.training import Reporter
from attnrx_lab.papers.experiment import Experiment, Run
from attnrx_lab.papers.pretrained_subject import loaded, outline_of, tiny_twin

Mix = Float[Tensor, "heads rank"]


@dataclass(frozen=True)
class FusionRun(Run):
    """A finished run of the fusion experiment; the fusion matrices are in its folder."""

    kind: ClassVar[str] = "attnrx fusion run"

    @property
    def experiment(self) -> "FusionExperiment":
        """The settings of the run."""
        return FusionExperiment.from_dict(self.record["settings"])

    def fusions(self, share: float) -> list[Tensor]:
        """Returns the fusion matrix of every layer, heads by directions, as fitted."""
        tensors = read_tensors(self.folder / "fusions.safetensors", self.record["fusions_sha256"])
        return [tensors[rule_of(share, f"layer-{layer}")] for layer in range(self.record["layers"])]


def fusion_of(mix: Mix) -> Fusion:
    """Returns the owner of each direction of a fusion matrix, with its columns sorted and rescaled."""
    nothing = torch.zeros(1, mix.shape[1], dtype=torch.float64)
    return fusion_ranks(Canonical(nothing, nothing, mix))


def rule_of(share: float, what: str) -> str:
    """Returns the name of the results at a share of the directions."""
    return f"{share:g}/{what}"


@dataclass(frozen=True)
class FusionExperiment(Experiment):
    """The scores of every layer of a pre-trained model in `shares` of its directions, shared by all heads (CPD-EPC).

    Only the weights are used. The seed draws the start: a start from the heads' own directions would give each
    direction
    one owner beforehand. A model whose heads share directions already is read unchanged.
    """

    kind: ClassVar[str] = "irratt-fusion"
    run_type: ClassVar[type[Run]] = FusionRun
    told_when_tiny: ClassVar[str] = "a tiny model with random weights; these numbers show that the recipe runs"
    knobs: ClassVar[Mapping[str, str]] = {
        "model": "the model {own} instead of {protocol}",
        "weights": "weights from a file ({own})",
    }

    subject: str
    model: str
    shares: tuple[float, ...]
    dataset: str = "none"
    seed: int = 0
    weights: str | None = None
    metric: str = "augmented"
    sweeps: int = 200
    tiny: bool = False

    def __post_init__(self):
        if not self.shares or any(not 0 < share <= 1 for share in self.shares):
            raise InvalidInput(f"FusionExperiment(shares={self.shares}): give at least one share in (0, 1].")

    @property
    def scenario(self) -> str:
        """The name of the model."""
        return self.subject

    def as_tiny(self) -> "FusionExperiment":
        """The same on a tiny model with as many heads and layers, with few sweeps."""
        return replace(self, tiny=True, sweeps=3)

    def run(self, folder: Path | str, *, reporter: Reporter | None = None, log: Log = no_log) -> FusionRun:
        """Decomposes every layer and reads the fusion matrices: `run_fusion`."""
        from attnrx_lab.papers.fusion import run_fusion  # avoids an import cycle

        return run_fusion(self, folder, log=log)

    def original(self) -> nn.Module:
        """The model itself, or its tiny stand-in."""
        if not self.tiny:
            return loaded(self.model, self.weights)
        outline = outline_of(self.model)
        return tiny_twin(outline, self.seed, len(family_of(outline).attention(outline)))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "FusionExperiment":
        """Returns the experiment that `to_dict` described."""
        return from_dict(record, (cls,))
