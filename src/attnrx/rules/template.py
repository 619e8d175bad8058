"""Rules in which one share is still open: what a budget may decide."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnrx.errors import InvalidInput
from attnrx.prescription import TOKENS
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.parsing import split_maps
from attnrx.rules.rule import Rule

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The texts of the rules by map, in which {share} stands for a share, the same in all.

    For example "qk=total_rank:{share} fc1=uniform_rank:{share}".
    """

    texts: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Reads the rules of several maps from one text."""
        return cls(split_maps(text))

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.texts.items())

    @property
    def has_token_share(self) -> bool:
        """Whether the share is also that of the tokens."""
        return SHARE in self.texts.get(TOKENS, "")

    @property
    def varies(self) -> bool:
        """Whether it depends on the share at all."""
        return any(SHARE in text for text in self.texts.values())

    def require_varying(self) -> None:
        """Refuses a template of which no cost can be chosen."""
        if not self.varies:
            raise InvalidInput(
                f"{str(self) or 'no rule'} has no share to choose: write {SHARE}, e.g. qk=total_rank:{SHARE}."
            )

    def at(self, share: float) -> dict[str, str]:
        """Returns the texts at one share."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Returns one rule for rules of all layers: itself where all are the same."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
