"""A baseline that plans, prunes and repairs a model as `shrink(macs=..., effort="quick")` does."""

from torch import nn

from attnrx.change.realization.realizing import realize_with_effort
from attnrx.data import ImageSet
from attnrx.decide.planning.planner import Planner, plan_sharing
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.effort import Effort, PlanSettings
from attnrx.nouns.plan import Plan
from attnrx.nouns.target import Target
from attnrx.support.errors import InvalidInput
from attnrx.vit.outputs import output_kind_of
from attnrx_lab.baselines.compressor import SearchedBaseline

LEAST = 16  # the smallest number of calibration images, because an eighth is held out to predict the results of plans


class PlanBaseline(SearchedBaseline):
    """Plans which parts to prune for a share of the MACs, then prunes and repairs as `effort="quick"` does.

    The baseline chooses the plan on seven eighths of the calibration images, and then fits the weights to all of them.
    All shares reuse the same search.

    Raises:
        InvalidInput: There are fewer than LEAST calibration images.
    """

    def __init__(self, model: nn.Module, diagnosis: Diagnosis, calibration: ImageSet, seed: int = 0):
        super().__init__(model, calibration, seed)
        if len(calibration) < LEAST:
            raise InvalidInput(f"{len(calibration)} calibration images: a plan needs {LEAST} or more.")
        self.diagnosis = diagnosis
        self._planners: dict[str, Planner] = {}

    def searched(self, share: float) -> nn.Module:
        """Returns the model pruned to this share of the MACs. Raises NotSupported if no plan reaches this share."""
        settings = PlanSettings.preset("quick", seed=self.seed)
        effort = Effort.of("quick", output_kind_of(self.model), self._macs, settings)
        images, others = self.calibration, self.calibration.take(len(self.calibration) // 8)
        # `plan_sharing` plans on `images` without `others`.
        about = self.model, self.diagnosis, Target("macs", share), images, others, self._planners
        plan = plan_sharing(*about, settings=effort.settings)
        assert isinstance(plan, Plan)  # the unchanged model can meet only latency targets
        return realize_with_effort(self.model, plan.with_predictions, images, effort)[0]
