"""The target of a plan and its text form: `faster=1.6`, `latency=60%`, `macs=50%`, `params=0.7x` or `max-drop=1pt`."""

from dataclasses import dataclass

from attnrx.support.arguments import FASTER, NOT_NEGATIVE, one_of, require_fields
from attnrx.support.errors import InvalidInput
from attnrx.support.text_parsing import Language, TextReader

COSTS = ("latency", "macs", "params")
DROP = "max-drop"
EXAMPLES = "faster=1.6, latency=0.6x, macs=50%, params=0.7x or max-drop=1pt"


@dataclass(frozen=True)
class Target:
    """An upper limit: a share of the original's latency, MACs or parameters, or a drop of top-1 accuracy in points.

    For a drop, `quantity` is "max-drop" and `minimized` the cost to minimize; otherwise both are the same.
    """

    quantity: str
    limit: float
    minimized: str = ""

    def __post_init__(self):
        require_fields(self, quantity=one_of(*COSTS, DROP), limit=NOT_NEGATIVE, minimized=one_of("", *COSTS))
        if self.quantity in COSTS and not 0 < self.limit < 1:
            raise InvalidInput(
                f"{self.quantity}={self.limit:g}x: give a share of the original's below 1, e.g. {self.quantity}=0.6x."
            )
        if self.quantity == DROP and not 0 <= self.limit <= 100:
            raise InvalidInput(f"max-drop={self.limit:g}pt: give percentage points from 0 to 100, e.g. max-drop=1pt.")
        # The class is frozen, and the default depends on another field.
        object.__setattr__(self, "minimized", self.minimized or ("macs" if self.quantity == DROP else self.quantity))
        if self.minimized not in COSTS or (self.quantity in COSTS and self.minimized != self.quantity):
            raise InvalidInput(
                f"minimized={self.minimized!r} (--spend) with a target for {self.quantity}: it goes with "
                f"max-drop, and is one of {', '.join(COSTS)}."
            )

    def __str__(self) -> str:
        return f"{self.quantity}={self.limit:g}{'pt' if self.quantity == DROP else 'x'}"

    @classmethod
    def parse(cls, text: str, minimized: str | None = None) -> "Target":
        """Parses a target: `quantity=number unit`; `faster=1.6`, `1.6x` and `1.6x faster` are 1 / 1.6 of the latency.

        Raises:
            InvalidInput: The text has another form, an unknown quantity or a number outside its range.
        """
        reader = _Reader(text)
        first = reader.token
        quantity = first.text if reader.take("name") else ""
        if quantity:
            reader.expect("=", f"'=' after {quantity}")
        start = reader.token.start
        number, unit = reader.read_measure("a number")
        if not quantity and reader.token.text == "faster":
            reader.take("name")
        reader.expect("end", "the end")
        is_speed = quantity in ("", "faster")
        if unit not in {DROP: ("", "pt")}.get(quantity, ("", "x") if is_speed else ("", "x", "%")):
            raise reader.problem(start, f"{quantity or 'a speed'} has the wrong unit {unit!r}")
        if is_speed and number <= 1:
            raise reader.problem(start, "a speed is a number above 1, and a share needs its quantity, as in macs=50%")
        if is_speed:
            return cls("latency", 1 / number, minimized or "")
        return cls(quantity, number / 100 if unit == "%" else number, minimized or "")


class _Reader(TextReader):
    language = Language("target", "Targets", EXAMPLES, "=", units=("x", "pt"))


def target_of(
    faster: float | None = None, macs: float | None = None, params: float | None = None, max_drop: float | None = None
) -> Target:
    """Returns the target of exactly one of the arguments.

    Raises:
        InvalidInput: None or several are given.
    """
    arguments = {"faster": faster, "macs": macs, "params": params, "max_drop": max_drop}
    named = {name: value for name, value in arguments.items() if value is not None}
    if len(named) != 1:
        raise InvalidInput(
            f"{' and '.join(named) or 'no target'} given: give exactly one of faster=1.6, macs=0.5, params=0.7 or "
            "max_drop=1."
        )
    ((name, value),) = named.items()
    if name == "faster":
        value = FASTER.checked(value, "Target", name)
        return Target("latency", 1 / value)
    return Target("max-drop" if name == "max_drop" else name, value)
