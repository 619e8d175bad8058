"""The facts that attnrx stores about a model, in the model's `__dict__`.

A model with such a record keeps its own class. Its copies, pickles and replicas keep the record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

RECORD = "attnrx_record"
"""The model attribute that holds the model's `Record`."""
KEPT_HEADS = "attnrx_heads"
"""The attribute in which an attention module stores the original indices of its remaining heads."""
TOKENS = "attnrx_tokens"
"""The name of the submodule that holds a model's token policy."""


@dataclass(frozen=True)
class Record:
    """The facts that attnrx needs to read a model and to recreate it.

    Attributes:
        family: The name of the family that reads the Vision Transformer.
        origin: How the Vision Transformer was created, and its input format (`Origin`).
        around: The parts around the Vision Transformer in a user's module (`Surroundings`), or None if the library or
            the reader recreates the whole model.
        facts: Other facts that the family stores, by name.
        outputs: The output kind that the user passed to `load`, or None if the user passed no kind.
    """

    family: str
    origin: Any
    around: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    outputs: str | None = None

    @property
    def path(self) -> str:
        """The path of the Vision Transformer in the model, or "" if the model itself is the Vision Transformer."""
        return "" if self.around is None else self.around.path


def record_of(model: nn.Module) -> Record | None:
    """Returns the record of a model, or None if it has none."""
    return vars(model).get(RECORD)
