"""What a prescription costs: all layers of a DeiT-B in seconds, and the directions of a diagnosis computed once."""

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnrx.decide.rules import prescribe_maps
from attnrx.nouns.diagnosis import Diagnosis, LayerDiagnosis
from attnrx.support.shapes import Tensor
from attnrx.vit.spec import Spectrum

HEADS, DIRECTIONS, WIDTH, LAYERS = 12, 64, 768, 12
LIMIT = 10.0  # CPU seconds of one thread


def moment(*shape: int, generator: torch.Generator) -> Tensor:
    rows = torch.randn(*shape, shape[-1], generator=generator, dtype=torch.float64)
    return rows @ rows.mT / shape[-1]


def layer(seed: int) -> LayerDiagnosis:
    generator = torch.Generator().manual_seed(seed)
    size = (HEADS, DIRECTIONS)
    tables = [torch.randn(*size, WIDTH + 1, generator=generator, dtype=torch.float64) for _ in range(2)]
    ones = torch.ones(size, dtype=torch.float64)
    spectrum = Spectrum(tables[0], tables[1], ones, ones.bool(), DIRECTIONS**-0.5, "none", tuple(range(HEADS)))
    names = ("query_gram", "key_covariance", "key_softmax", "readout_gram")
    readings = {name: moment(*size, generator=generator) for name in names}
    readings["output_mean"] = torch.zeros(size, dtype=torch.float64)
    readings["output_covariance"] = moment(HEADS * DIRECTIONS, generator=generator).reshape(*size, -1)
    return LayerDiagnosis(spectrum, readings)


@pytest.mark.slow
def test_a_deit_base_is_prescribed_in_seconds() -> None:
    found = Diagnosis(tuple(layer(seed) for seed in range(LAYERS)), "a model", {})
    started = time.process_time()
    prescription = prescribe_maps(found, "qk=total_rank:0.5,scope=model vo=total_rank:0.5")
    assert time.process_time() - started < LIMIT
    assert sum(sum(ranks) for ranks in prescription.ranks) == HEADS * DIRECTIONS * LAYERS // 2


class Decompositions(TorchDispatchMode):
    """Counts eigenvalue and singular value decompositions."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(part in str(function) for part in ("svd", "eigh"))
        return function(*args, **(kwargs or {}))


def test_the_directions_of_a_diagnosis_are_computed_once() -> None:
    found, counts = Diagnosis((layer(0),), "a model", {}), []
    for share in (0.5, 0.75):  # a plan prescribes from one diagnosis for every candidate
        with Decompositions() as seen:
            prescribe_maps(found, f"qk=uniform_rank:{share} vo=uniform_rank:{share}", refit=False)
        counts.append(seen.count)
    assert counts[0] > 0 and counts[1] == 0
