"""Rules in which one share is still open: what a budget may decide."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnrx.errors import InvalidInput
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.rule import Rule

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The texts of the rules about scores, values and MLP, and of a token policy, in which {share} stands for a share.

    All have the same share, e.g. rule="total_rank:{share}", mlp="uniform_rank:{share}".
    """

    rule: str | None = None
    metric: str | None = None
    values: str | None = None
    mlp: str | None = None
    tokens: str | None = None

    @property
    def texts(self) -> dict[str, str | None]:
        """The rules by the name that `prescribe` gives them."""
        return {"rule": self.rule, "values": self.values, "mlp": self.mlp}

    @property
    def everything(self) -> dict[str, str | None]:
        """The rules and the policy."""
        return {**self.texts, "tokens": self.tokens}

    @property
    def drops_by_share(self) -> bool:
        """Whether the share is also that of the tokens."""
        return self.tokens is not None and SHARE in self.tokens

    @property
    def varies(self) -> bool:
        """Whether it depends on the share at all."""
        return any(text is not None and SHARE in text for text in self.everything.values())

    def require_varying(self) -> None:
        """Refuses a template of which no cost can be chosen."""
        if not self.varies:
            given = ", ".join(f"{name}={text}" for name, text in self.everything.items() if text) or "no rule"
            raise InvalidInput(
                f"{given} leaves nothing to choose: write {SHARE} for the share, e.g. total_rank:{SHARE}."
            )

    def at(self, share: float) -> dict[str, Any]:
        """Gives what `prescribe` is asked, for one share, rules as text."""
        told = self.everything.items()
        texts = {kind: None if text is None else text.replace(SHARE, repr(share)) for kind, text in told}
        return {**texts, "metric": self.metric}


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Gives one rule for rules of all layers: itself where all are the same."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
