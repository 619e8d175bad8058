"""Draws the patches that SPOT keeps in test images after every stage (Figures 3 and 6)."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from attnrx.data.model_data import adapt_preprocessing
from attnrx.show.figures import figures
from attnrx.show.reports import first_images as first_pictures
from attnrx.show.reports import sample_tokens
from attnrx.support.optional import required_module
from attnrx.support.progress import Log
from attnrx.vit.models import model_fingerprint
from attnrx_lab.papers.experiment import plain_measures
from attnrx_lab.papers.processes import is_first
from attnrx_lab.papers.spot import DerivedExperiment, SpotExperiment, outline_for, token_price


@dataclass(frozen=True)
class KeptPatchesExperiment(DerivedExperiment):
    """Draws which patches one model of the SPOT experiment keeps in `shown` test images of different classes.

    The run's folder contains the figures as SVG and PDF, and the plotted numbers as CSV.
    """

    kind: ClassVar[str] = "spot-kept"
    knobs: ClassVar[tuple[str, ...]] = (*SpotExperiment.knobs, "tuned")

    shown: int = 6

    def measured(self, folder: Path, log: Log, stages: Collection[str]) -> dict[str, Any]:
        """Makes the model, and draws which patches it keeps.

        Raises:
            NotSupported: Matplotlib is not installed. The method checks this before any training.
        """
        required_module("matplotlib", "figures", "a figure")
        splits = self.splits()
        original, candidate = self.models(folder, log, splits)
        self.claim(folder)
        adapted = adapt_preprocessing(splits, original)
        images, labels = first_pictures(adapted.test, adapted.class_names, self.shown)
        samples = sample_tokens(candidate, images, labels)
        if is_first():
            files = figures(samples, folder)
            log(f"{self.name}: {', '.join(map(str, files))}")
        price = plain_measures(token_price(outline_for(self.model, self.subject), self.method))
        shares = samples.left.double().mean((0, 2)).tolist()  # for every stage, over the images
        left = {f"left_{stage}": 100 * share for stage, share in enumerate(shares, 1)}
        picture = f"the picture is {self.place.as_posix()}/kept-patches.svg, and .pdf; the numbers are in .csv"
        return {
            "data": {"name": splits.name, "images": len(images), "notes": [*splits.notes, picture]},
            "model": {"fingerprint": model_fingerprint(original)},
            "rules": {self.method.name: {"paper": price, "measured": plain_measures(left)}},
        }
