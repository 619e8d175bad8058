"""The target of a plan, which limits a cost, the file size, or the change of the model's outputs."""

import re
from dataclasses import dataclass
from math import inf

from attnrx.support.arguments import ANY_TEXT, NOT_NEGATIVE, checked, one_of, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.text_parsing import NAME, NUMBER

COSTS = ("latency", "macs", "params")
DROP, DIVERGENCE, RECALL, SIZE = "max-drop", "max-kl", "recall", "size"
LOSSES = (DROP, DIVERGENCE, RECALL)
EXAMPLES = "faster=1.6, latency=0.6x, macs=50%, params=0.7x, size=4MB, max-kl=0.05, recall=98% or max-drop=1pt"
FORM = re.compile(rf"\s*(?:({NAME})\s*=)?\s*({NUMBER})\s*(x|pt|%|MB)?(\s+faster)?\s*")
# The units in which each quantity may be written, and the unit in which it is printed.
UNITS = {DROP: ("", "pt"), DIVERGENCE: ("",), RECALL: ("", "%"), SIZE: ("", "MB"), "faster": ("", "x")}
PRINTED = {DROP: "pt", DIVERGENCE: "", RECALL: "", SIZE: "MB"}
MINIMIZED = {DROP: "macs", DIVERGENCE: "macs", RECALL: "macs", SIZE: "params"}


@dataclass(frozen=True)
class Target:
    """A limit for one quantity.

    "latency", "macs" and "params" have an upper limit, as a share of the original model's cost. "size" is an upper
    limit for the file, in megabytes. "max-kl" limits the mean divergence from the original model's outputs, which is in
    nats for class outputs. "max-drop" limits the loss of top-1 accuracy, in points. "recall" is a lower limit. The
    smaller model embeds a query, and the original model has embedded the index. Recall is the share of the query's
    nearest neighbours that the search still finds.
    """

    quantity: str
    limit: float

    def __post_init__(self):
        require_fields(self, quantity=one_of(*COSTS, SIZE, *LOSSES), limit=NOT_NEGATIVE)
        if self.quantity in COSTS and not 0 < self.limit < 1:
            raise InvalidInput(
                f"{self.quantity}={self.limit:g}x: give a share of the original's below 1, e.g. {self.quantity}=0.6x."
            )
        if self.quantity in (DIVERGENCE, SIZE) and not 0 < self.limit < inf:
            raise InvalidInput(f"{self.quantity}={self.limit:g}: give a number above 0, e.g. {self.quantity}=0.05.")
        if self.quantity == RECALL and not 0 < self.limit < 1:
            raise InvalidInput(f"recall={self.limit:g}: give a share of the neighbours below 1, e.g. recall=0.98.")
        if self.quantity == DROP and self.limit > 100:
            raise InvalidInput(f"max-drop={self.limit:g}pt: give percentage points from 0 to 100, e.g. max-drop=1pt.")

    @property
    def minimized(self) -> str:
        """The cost that a plan for this target minimizes.

        If the target limits a cost, the plan minimizes this cost. If the target limits a loss, the plan minimizes MACs.
        If the target limits the file size, the plan minimizes parameters.
        """
        return MINIMIZED.get(self.quantity, self.quantity)

    def __str__(self) -> str:
        return f"{self.quantity}={self.limit:g}{PRINTED.get(self.quantity, 'x')}"

    @classmethod
    @checked(text=ANY_TEXT)
    def parse(cls, text: str) -> "Target":
        """Parses a target in the form `quantity=number unit`.

        `faster=1.6`, `1.6x` and `1.6x faster` all limit the latency to 1 / 1.6 of the original model's latency.

        Raises:
            InvalidInput: The text is not a valid target, the quantity is unknown, or the number is outside its range.
        """
        read = FORM.fullmatch(text)
        if read is None or (read[1] and read[4]):
            raise InvalidInput(f"the target {text!r:.300} cannot be read. Targets read like {EXAMPLES}.")
        quantity, number, unit = read[1] or "faster", float(read[2]), read[3] or ""
        is_speed = quantity == "faster"
        if unit not in UNITS.get(quantity, ("", "x", "%")):
            raise InvalidInput(f"the target {text!r} has the wrong unit {unit!r}. Targets read like {EXAMPLES}.")
        if is_speed and number <= 1:
            raise InvalidInput(f"the target {text!r}: a speed is above 1, and a share needs its quantity: macs=50%.")
        return cls("latency", 1 / number) if is_speed else cls(quantity, number / 100 if unit == "%" else number)


def target_of(
    faster: float | None = None,
    macs: float | str | None = None,
    params: float | str | None = None,
    max_drop: float | None = None,
    max_kl: float | None = None,
    size: float | None = None,
    recall: float | str | None = None,
) -> Target:
    """Returns the target for the argument that is given. Exactly one argument must be given.

    Raises:
        InvalidInput: Not exactly one argument is given, or its value is not a number in the allowed range.
    """
    arguments = {"faster": faster, "macs": macs, "params": params}
    arguments |= {"max_drop": max_drop, "max_kl": max_kl, "size": size, "recall": recall}
    named = {name: value for name, value in arguments.items() if value is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{' and '.join(named) or 'no target'} given: give exactly one of faster=1.6, macs=0.5, params=0.7, "
            "max_drop=1, max_kl=0.05, recall=0.98 or size=4."
        )
    ((name, value),) = named.items()
    return Target.parse(f"{name.replace('_', '-')}={value}")
