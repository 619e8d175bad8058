"""Token pruning and merging: reducers that select, before some layers, which tokens the next layers process."""

from collections.abc import Mapping
from typing import Any

from attnrx.support.errors import InvalidInput
from attnrx.support.optional import import_plugins
from attnrx.support.records import from_dict
from attnrx.vit.tokens.merging import ToMe, Ward
from attnrx.vit.tokens.policy import PolicyReader, TokenPolicy
from attnrx.vit.tokens.reducer import (
    AttentionReceived,
    ClassAttention,
    LayerStatistic,
    Reducer,
    Reduction,
    SampledTokens,
    Selecting,
    Shape,
    TokenLayout,
    TokenState,
    counted,
    destinations_of,
    gathered_rows,
)

# Every reducer by its name in text.
REDUCERS: Mapping[str, type[Reducer]] = {
    "class_attention": ClassAttention,
    "attention_received": AttentionReceived,
    "tome": ToMe,
    "ward": Ward,
}
# Stated once, here: `str(reducer)` writes the name that `parse_reducer` reads.
for _name, _kind in REDUCERS.items():
    _kind.name = _name
_REGISTERED: dict[str, type[Reducer]] = {}

__all__ = [
    "REDUCERS", "AttentionReceived", "ClassAttention", "LayerStatistic", "Reducer", "Reduction", "SampledTokens",
    "Selecting", "Shape", "ToMe", "TokenLayout", "TokenPolicy", "TokenState", "Ward", "counted", "destinations_of",
    "gathered_rows", "known_reducers", "parse_policy", "parse_reducer", "policy_from_dict", "register_reducer",
]  # fmt: skip


def register_reducer(name: str, kind: type[Reducer]) -> None:
    """Makes a reducer of your own known under a name, in texts of policies and in saved models.

    A model that was saved with it can be loaded after the same call only.

    Raises:
        InvalidInput: Another reducer has this name.
    """
    if {**REDUCERS, **_REGISTERED}.get(name, kind) is not kind:
        raise InvalidInput(f"the token reducer {name} exists already; choose another name.")
    kind.name = name
    _REGISTERED[name] = kind


def known_reducers() -> Mapping[str, type[Reducer]]:
    """Returns the reducers of this package and the registered ones, those of other packages among them, by name."""
    import_plugins()
    return {**REDUCERS, **_REGISTERED}


def parse_policy(text: str) -> TokenPolicy:
    """Parses a policy, NAME[(knob=value,...)]:RATIO@LAYER,LAYER,..., e.g. `evit:0.7@4,7,10`, or NAME:N@every.

    One ratio is the share of the remaining patches kept at every stage; ratios separated by / are shares of the image's
    patches, one per stage. `tome:13@every` reduces the patches by 13 before every layer but the first.

    Raises:
        InvalidInput: The text is no policy; the message marks the place.
        UnknownName: There is no such reducer.
    """
    return PolicyReader(text, known_reducers()).read_policy()


def parse_reducer(text: str) -> Reducer:
    """Parses a reducer without stages, NAME[(knob=value,...)], e.g. `ward` or `ward(lengths=false)`.

    Raises:
        InvalidInput: The text is no reducer.
        UnknownName: There is no such reducer.
    """
    reader = PolicyReader(text, known_reducers())
    reducer = reader.read_reducer()
    reader.expect("end", "the end; a reducer is given here without stages")
    return reducer


def policy_from_dict(record: Mapping[str, Any]) -> TokenPolicy:
    """Builds a policy from the record in a model or a prescription."""
    return from_dict(record, (TokenPolicy, *known_reducers().values()))
