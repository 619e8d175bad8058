"""Rule templates with one open share, which a budget search sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnrx.errors import InvalidInput
from attnrx.maps import TOKENS
from attnrx.rules.by_layer import ByLayer
from attnrx.rules.parsing import split_maps
from attnrx.rules.rule import Rule

SHARE = "{share}"


@dataclass(frozen=True)
class Template:
    """The rule texts by map, with the placeholder {share} for one common share.

    For example "qk=total_rank:{share} fc1=uniform_rank:{share}".
    """

    texts: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """Parses the rules of several maps from one text."""
        return cls(split_maps(text))

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.texts.items())

    @property
    def has_token_share(self) -> bool:
        """Whether the share also applies to the tokens."""
        return SHARE in self.texts.get(TOKENS, "")

    @property
    def varies(self) -> bool:
        """Whether any rule depends on the share."""
        return any(SHARE in text for text in self.texts.values())

    def require_varying(self) -> None:
        """Raises InvalidInput if no rule depends on the share."""
        if not self.varies:
            raise InvalidInput(
                f"{str(self) or 'no rule'} has no share to choose: write {SHARE}, e.g. qk=total_rank:{SHARE}."
            )

    def at(self, share: float) -> dict[str, str]:
        """Returns the texts with one share inserted."""
        return {name: text.replace(SHARE, repr(share)) for name, text in self.texts.items()}


def by_layer(rules: Sequence[Rule]) -> Rule:
    """Returns one rule from the rules of all layers: that rule itself if all are equal, else a ByLayer."""
    return rules[0] if all(rule == rules[0] for rule in rules) else ByLayer(tuple(rules))
