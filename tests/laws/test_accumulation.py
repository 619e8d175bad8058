"""A step in parts == the step at once, to rounding, whatever is mixed, taught or perturbed."""

from pathlib import Path

import pytest
import torch

from attnrx.training.losses import Distillation, FeatureDistillation, PerturbationRobustness, Task
from attnrx.vit.models import save_model
from support.tiny_runs import model, run, weights


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.slow
def test_a_step_in_parts_is_the_step_at_once(parts: int, tmp_path: Path) -> None:
    teacher = model()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    folder = str(save_model(tmp_path / "teacher", teacher))
    losses = (Task(0.1), PerturbationRobustness(0.1), Distillation(folder), FeatureDistillation(folder))
    once, cut = (run(tmp_path / str(accumulate), losses=losses, accumulate=accumulate) for accumulate in (1, parts))
    torch.testing.assert_close(weights(cut), weights(once), rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(cut.history, once.history, strict=True):
        for name in ("loss", "accuracy", "gradient_norm", "validation_loss"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9), name
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-9)
