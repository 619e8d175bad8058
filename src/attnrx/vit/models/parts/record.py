"""What attnrx knows of a model, beside it: a model of a library or a user stays what it is, and has this in its
`__dict__`, so that copies, pickles and replicas have it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

RECORD = "attnrx_record"
"""The attribute of a model with its `Record`."""
KEPT_HEADS = "attnrx_heads"
"""The attribute of an attention module with the indices, in the original model, of the heads that are left in it."""
TOKENS = "attnrx_tokens"
"""The name of the submodule with the token policy of a model."""


@dataclass(frozen=True)
class Record:
    """How a model is read and created again.

    Attributes:
        family: The name of the family that reads the Vision Transformer.
        origin: How the Vision Transformer is created, and its input format (`Origin`).
        around: What is around the Vision Transformer in a module of a user (`Surroundings`); None for a model that its
            library, or its reader, creates again.
        facts: What the family keeps besides, by name.
        outputs: The kind of the outputs, where a user stated it.
    """

    family: str
    origin: Any
    around: Any = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    outputs: str | None = None

    @property
    def path(self) -> str:
        """Where the Vision Transformer is in the model, "" if it is the model itself."""
        return "" if self.around is None else self.around.path


def record_of(model: nn.Module) -> Record | None:
    """Returns the record of a model; None where it has none."""
    return vars(model).get(RECORD)
