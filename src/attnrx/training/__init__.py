"""Training on one or several processes, with exact resume."""

from attnrx.training.config import TrainingConfig
from attnrx.training.mixing import Mixing
from attnrx.training.reporters import PlainLines, ProgressBars, Reporter, Several, Silent, default_reporter
from attnrx.training.tensorboard import TensorBoard
from attnrx.training.trainer import TrainingRun, train

__all__ = [
    "Mixing",
    "PlainLines",
    "ProgressBars",
    "Reporter",
    "Several",
    "Silent",
    "TensorBoard",
    "TrainingConfig",
    "TrainingRun",
    "default_reporter",
    "train",
]
