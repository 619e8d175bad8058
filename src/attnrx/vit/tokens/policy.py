"""The token policy: a reducer, the layers before which it runs, and the number of tokens kept at each stage.

Policies as text: `attention_received:0.7@4,7,10`, `ward(relevance=0.3):0.7@4,7,10`, `class_attention:0.8/0.5@4,7`,
`tome:13@every`.

    policy  = reducer ":" ( ratio { "/" ratio } "@" layer { "," layer } | number "@every" )
    reducer = call (`support.text_parsing`), whose knobs may be reducers

One ratio is the share of the remaining patches that every stage keeps. Several ratios are the shares of the image's
patches that remain after each stage. A number before @every is the number of patches to remove before every layer
except the first. Invariant: parse_policy(str(policy)) == policy.written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from attnrx.support.arguments import require_fields
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.records import from_dict
from attnrx.support.registry import Registry
from attnrx.support.text_parsing import TextReader, share
from attnrx.vit.tokens.merging import ToMe, Ward
from attnrx.vit.tokens.reducer import AttentionReceived, ClassAttention, Reducer, TokenLayout

EXAMPLES = "ward:0.7@4,7,10, ward(relevance=0.3):0.7@4,7,10, class_attention:0.8/0.5@4,7, tome:13@every"
EVERY = "every"
PER_TOKEN = ("keys", "tokens")
"""What a reducer may use even if some layers attend within windows and others across all windows."""


@dataclass(frozen=True)
class TokenPolicy:
    """A reducer that runs before each of `layers` (counted from 1).

    `keep` is the share of the image's patches that remains after each stage. For the papers' keep ratio rho, it is
    (rho, rho^2, rho^3). Counts are rounded down: 137, 96 and 67 of 196 at 0.7.

    `num_pruned` is the number of patches to remove before every layer except the first. ToMe calls this schedule r,
    although the paper merges inside every layer, including the last. Layers and shares then depend on the model, and
    `on` sets them.
    """

    reducer: Reducer
    layers: tuple[int, ...] = ()
    keep: tuple[float, ...] = ()
    num_pruned: int | None = None

    def __post_init__(self):
        require_fields(self)
        if self.num_pruned is not None and self.num_pruned < 1:
            raise InvalidInput(f"{self.num_pruned} patches to prune before every layer: give 1 or more.")
        if self.num_pruned is not None and not self.layers and not self.keep:  # as in the text, before `on`
            return
        if not self.layers or len(self.layers) != len(self.keep):
            raise InvalidInput(
                f"{len(self.layers)} stages and {len(self.keep)} keep ratios: give one for each stage, at least one."
            )
        if self.layers[0] < 2 or any(after <= before for before, after in pairwise(self.layers)):
            raise InvalidInput(
                f"stages before the layers {self.layers}: layers count from 1 and must increase, and the first "
                "stage needs a previous layer; give e.g. 4, 7, 10."
            )
        if any(not 0 < ratio <= 1 for ratio in self.keep) or list(self.keep) != sorted(self.keep, reverse=True):
            raise InvalidInput(
                f"keep={self.keep}: the shares of patches after each stage must lie in (0, 1] and not increase."
            )

    @classmethod
    def staged(cls, reducer: Reducer, ratio: float, layers: tuple[int, ...]) -> "TokenPolicy":
        """Returns a policy that keeps the share `ratio` of the remaining patches at every stage: ratio^s after s."""
        return cls(reducer, layers, _powers(ratio, len(layers)))

    def __str__(self) -> str:
        if self.num_pruned is not None:
            return f"{self.reducer}:{self.num_pruned}@every"
        # Exact equality is safe, because `staged` computes the powers with the same function. repr round-trips.
        staged = self.keep == _powers(self.keep[0], len(self.keep))
        ratios = repr(self.keep[0]) if staged else "/".join(map(repr, self.keep))
        return f"{self.reducer}:{ratios}@{','.join(map(str, self.layers))}"

    @property
    def drops(self) -> bool:
        """Whether the policy reduces the tokens at all."""
        return self.num_pruned is not None or self.keep[-1] < 1

    @property
    def written(self) -> "TokenPolicy":
        """The policy as its text describes it. For an every-layer policy, it has no layers and no shares."""
        return self if self.num_pruned is None else replace(self, layers=(), keep=())

    def on(self, layout: TokenLayout, depth: int) -> "TokenPolicy":
        """Returns the policy with its layers and shares in a model.

        Raises:
            InvalidInput: The model has too few layers or patches.
            NotSupported: The reducer needs a class token, and the model has none. Or it needs attention maps, and the
                model's attention runs in windows.
        """
        policy, patches = self, layout.patches
        if self.num_pruned is not None:
            most = (patches - 1) // max(depth - 1, 1)  # at least one patch remains after the last stage
            if depth < 2 or self.num_pruned > most:
                raise InvalidInput(
                    f"{self.num_pruned} of {patches} patches to prune before each of the layers 2 to {depth}: give 1 "
                    f"to {most} patches per layer, so that one remains, and a model of at least two layers."
                )
            keep = tuple((patches - self.num_pruned * stage) / patches for stage in range(1, depth))
            policy = replace(self, layers=tuple(range(2, depth + 1)), keep=keep)
        policy.require_depth(depth)
        if "class_attention" in self.reducer.needs and not layout.class_token:
            raise NotSupported(
                f"{type(self.reducer).__name__} needs the attention of the class token, and this model has none; use a "
                "reducer without class attention, e.g. random, attention_received or tome."
            )
        others = sorted({*self.reducer.needs, *self.reducer.every_layer.split()} - set(PER_TOKEN))
        if layout.windows > 1 and others:
            raise NotSupported(
                f"{type(self.reducer).__name__} needs {', '.join(others)}, and the attention of this model runs in "
                f"{layout.windows} windows per image; use a reducer without attention maps, e.g. ward, tome or random."
            )
        policy.counts(patches)  # raises an error if the last stage would keep no patch
        return policy

    def describe(self) -> tuple[str, ...]:
        """Returns one sentence per stage, or one sentence for an every-layer policy."""
        if self.num_pruned is not None:
            return (
                f"before every layer but the first {self.reducer} removes {self.num_pruned} of the image's patches",
            )
        return tuple(
            f"before layer {layer} {self.reducer} keeps {ratio:.4g} of the image's patches"
            for layer, ratio in zip(self.layers, self.keep, strict=True)
        )

    def counts(self, patches: int) -> tuple[int, ...]:
        """Returns the number of patches that remain after each stage.

        Raises:
            InvalidInput: The last stage would keep no patch.
        """
        # Products of ratios such as 0.7**2 can be just below a whole number.
        num_kept = tuple(math.floor(ratio * patches + 1e-9) for ratio in self.keep)
        if num_kept[-1] < 1:
            raise InvalidInput(f"keep={self.keep} keeps no patch of {patches}; give larger shares.")
        return num_kept

    def tokens(self, layout: TokenLayout, depth: int) -> tuple[int, ...]:
        """Returns the number of tokens in every layer, including prefix tokens and tokens added by stages."""
        current, counts = layout.tokens, dict(zip(self.layers, self.counts(layout.patches), strict=True))
        # A stage that keeps every patch does not run (`TokenReduction.decide`), so it adds no token either.
        after = {layer: layout.prefix + n + self.reducer.extra for layer, n in counts.items() if n < layout.patches}
        return tuple(current := after.get(layer, current) for layer in range(1, depth + 1))

    def require_depth(self, depth: int) -> None:
        """Raises InvalidInput if the model has too few layers."""
        if self.layers and self.layers[-1] > depth:
            raise InvalidInput(
                f"stages before the layers {self.layers} of a model that has {depth}; give layers from 2 to {depth}."
            )


def _powers(ratio: float, count: int) -> tuple[float, ...]:
    return tuple(ratio**stage for stage in range(1, count + 1))


# A model that was saved with your own reducer can be loaded only after `REDUCERS.register(Mine)`.
REDUCERS = Registry[type[Reducer]]("token reducer", ClassAttention, AttentionReceived, ToMe, Ward)


class PolicyReader(TextReader):
    """Reads policies. Every method consumes the tokens of one rule of the grammar."""

    noun, plural, examples, signs = "policy", "Policies", EXAMPLES, "():,=/@"
    nested = Reducer

    def read_policy(self) -> TokenPolicy:
        reducer = self.read_reducer()
        self.expect(":", "':' and the keep ratio")
        # A number before @every is first parsed as a ratio, because the @ comes later. `first` stores its token.
        first = self.token
        ratios = [self.read_ratio()]
        while self.take("/"):
            ratios.append(self.read_ratio())
        self.expect("@", "'@' and the layers before which tokens are pruned")
        if self.token.text == EVERY:
            self.expect("name", EVERY)
            self.expect("end", "the end")
            if len(ratios) > 1 or not first.text.isdigit():
                problem = f"give one number before @{EVERY}: the patches to prune before every layer"
                raise self.problem(first.start, problem)
            return TokenPolicy(reducer, num_pruned=int(first.text))
        layers = [self.read_layer()]
        while self.take(","):
            layers.append(self.read_layer())
        self.expect("end", "the end")
        if len(ratios) == 1:
            return TokenPolicy.staged(reducer, ratios[0], tuple(layers))
        return TokenPolicy(reducer, tuple(layers), tuple(ratios))

    def read_reducer(self) -> Reducer:
        name, kind = self.read_name(REDUCERS)
        return self.build(name, kind, self.read_knobs(name, kind))

    read_nested = read_reducer

    def read_ratio(self) -> float:
        return share(self.expect("number", "a keep ratio, e.g. 0.7").text)

    def read_layer(self) -> int:
        layer = self.expect("number", "a layer, e.g. 4")
        if not layer.text.isdigit():
            raise self.problem(layer.start, f"{layer.text} is not the number of a layer")
        return int(layer.text)


def parse_policy(text: str) -> TokenPolicy:
    """Parses a policy, NAME[(knob=value,...)]:RATIO@LAYER,LAYER,..., e.g. `ward:0.7@4,7,10`, or NAME:N@every.

    One ratio is the share of the remaining patches that every stage keeps. Ratios separated by / are shares of the
    image's patches, one per stage. `tome:13@every` removes 13 patches before every layer except the first.

    Raises:
        InvalidInput: The text is not a policy. The message points to the place.
        UnknownName: There is no such reducer.
    """
    return PolicyReader(text).read_policy()


def parse_reducer(text: str) -> Reducer:
    """Parses a reducer without stages, NAME[(knob=value,...)], e.g. `ward` or `ward(lengths=false)`.

    Raises:
        InvalidInput: The text is not a reducer.
        UnknownName: There is no such reducer.
    """
    reader = PolicyReader(text)
    reducer = reader.read_reducer()
    reader.expect("end", "the end; a reducer is given here without stages")
    return reducer


def policy_from_dict(record: Mapping[str, Any]) -> TokenPolicy:
    """Builds a policy from its record in a model or a prescription."""
    return from_dict(record, (TokenPolicy, *REDUCERS.values()))
