"""Token policies, which say which reducer runs, before which layers, and how many tokens it keeps.

You write policies as text, e.g. `attention_received:0.7@4,7,10`, `ward(relevance=0.3):0.7@4,7,10`,
`class_attention:0.8/0.5@4,7` or `tome:13@every`. The grammar is

    policy  = reducer ":" ( ratio { "/" ratio } "@" layer { "," layer } | number "@every" )
    reducer = call (`support.text_parsing`), whose knobs may be reducers

A stage is one run of the reducer before one of the layers. With one ratio, every stage keeps this share of the
remaining patches. With several ratios, the i-th ratio is the share of the image's patches that remains after stage i.
`N@every` removes N patches before every layer except the first. Parsing a formatted policy returns the policy as
written: parse_policy(str(policy)) == policy.written.
"""

import math
from collections.abc import Collection, Mapping
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
"""The inputs of reducers that are also available in models whose layers attend within windows."""


@dataclass(frozen=True)
class TokenPolicy:
    """A reducer with its schedule: the stages at which it runs, and how many patches remain after each stage.

    A stage runs before each of the `layers`, which are counted from 1. `keep` contains the share of the image's patches
    that remains after each stage. If a paper states a keep ratio of rho for three stages, `keep` is the powers rho,
    rho^2 and rho^3. Numbers of patches are rounded down. For example, at a ratio of 0.7, 137, 96 and 67 of 196 patches
    remain after the three stages.

    If `num_pruned` is not None, this number of patches is removed before every layer except the first. `on` then sets
    `layers` and `keep` for a given model. The ToMe paper calls this number r, but it merges inside every layer,
    including the last.
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
        """Returns a policy whose stages each keep the share `ratio` of the remaining patches.

        After s stages, the share ratio^s of the image's patches remains.
        """
        return cls(reducer, layers, _powers(ratio, len(layers)))

    def __str__(self) -> str:
        if self.num_pruned is not None:
            return f"{self.reducer}:{self.num_pruned}@every"
        # Floats are compared for equality, because `staged` computes the powers by the same function. `repr` writes all
        # digits, so parsing returns the same floats.
        staged = self.keep == _powers(self.keep[0], len(self.keep))
        ratios = repr(self.keep[0]) if staged else "/".join(map(repr, self.keep))
        return f"{self.reducer}:{ratios}@{','.join(map(str, self.layers))}"

    @property
    def drops(self) -> bool:
        """Whether the policy removes any tokens."""
        return self.num_pruned is not None or self.keep[-1] < 1

    @property
    def written(self) -> "TokenPolicy":
        """The policy as its text states it. The text of an `@every` policy contains neither layers nor shares."""
        return self if self.num_pruned is None else replace(self, layers=(), keep=())

    def on(self, layout: TokenLayout, depth: int) -> "TokenPolicy":
        """Checks that the policy fits a model, and returns the policy with the `layers` and `keep` for this model.

        Raises:
            InvalidInput: The model has too few layers or patches.
            NotSupported: The reducer needs a class token that the model does not have, or attention maps that a model
                with windows does not have.
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
        needed = {*self.reducer.needs, *self.reducer.every_layer.split()}
        if layout.in_layers and (needed or self.reducer.learned or not self.reducer.proportional):
            raise NotSupported(
                f"the blocks of this model take grids of tokens, so tokens are merged inside every layer, and "
                f"{type(self.reducer).__name__} {self._unfit_in_layers(needed)}; use ward."
            )
        others = sorted(needed - set(PER_TOKEN))
        if layout.windows > 1 and others:
            raise NotSupported(
                f"{type(self.reducer).__name__} needs {', '.join(others)}, and the attention of this model runs in "
                f"{layout.windows} windows per image; use a reducer without attention maps, e.g. ward, tome or random."
            )
        policy.counts(patches)  # raises an error if the last stage would keep no patch
        return policy

    def _unfit_in_layers(self, needed: Collection[str]) -> str:
        """Returns why the reducer cannot merge tokens inside layers, as the end of a sentence."""
        if needed:
            return f"needs {', '.join(sorted(needed))} of the layer before"
        return "is learned" if self.reducer.learned else "removes tokens and does not merge them"

    def describe(self) -> tuple[str, ...]:
        """Returns a description of the policy: one sentence per stage, or one sentence for an `@every` policy."""
        if self.num_pruned is not None:
            return (
                f"before every layer but the first {self.reducer} removes {self.num_pruned} of the image's patches",
            )
        return tuple(
            f"from layer {layer} on {self.reducer} keeps {ratio:.4g} of the image's patches"
            for layer, ratio in zip(self.layers, self.keep, strict=True)
        )

    def counts(self, patches: int) -> tuple[int, ...]:
        """Returns how many of `patches` patches remain after each stage.

        Raises:
            InvalidInput: The last stage would keep no patch.
        """
        # Rounding can put a product such as 0.7**2 * patches just below a whole number.
        num_kept = tuple(math.floor(ratio * patches + 1e-9) for ratio in self.keep)
        if num_kept[-1] < 1:
            raise InvalidInput(f"keep={self.keep} keeps no patch of {patches}; give larger shares.")
        return num_kept

    def left_in(self, layer: int, tokens: int, patches: int) -> int:
        """Returns how many of the `tokens` tokens of a sequence remain in a layer that merges inside itself.

        Args:
            layer: The layer, counted from 1.
            tokens: The number of tokens in the sequence, e.g. in a window.
            patches: The number of patches in the image, of which `counts` remain.
        """
        stage = self.stage_of(layer)
        # The same whole-number arithmetic is used for the costs, so that they equal a count.
        return tokens if stage is None else max(self.counts(patches)[stage] * tokens // patches, 1)

    def stage_of(self, layer: int) -> int | None:
        """Returns the number of the last stage before a layer (counted from 1), or None if there is none."""
        return next((stage for stage, first in reversed([*enumerate(self.layers)]) if first <= layer), None)

    def tokens(self, layout: TokenLayout, depth: int) -> tuple[int, ...]:
        """Returns the number of tokens in every layer, including prefix tokens and tokens that stages add."""
        current, counts = layout.tokens, dict(zip(self.layers, self.counts(layout.patches), strict=True))
        # A stage that keeps every patch does not run (`TokenReduction.decide`), so it also adds no token.
        after = {layer: layout.prefix + n + self.reducer.extra for layer, n in counts.items() if n < layout.patches}
        return tuple(current := after.get(layer, current) for layer in range(1, depth + 1))

    def require_depth(self, depth: int) -> None:
        """Raises InvalidInput if a stage comes after the last layer of a model with `depth` layers."""
        if self.layers and self.layers[-1] > depth:
            raise InvalidInput(
                f"stages before the layers {self.layers} of a model that has {depth}; give layers from 2 to {depth}."
            )


def _powers(ratio: float, count: int) -> tuple[float, ...]:
    return tuple(ratio**stage for stage in range(1, count + 1))


# Call `REDUCERS.register(Mine)` before you parse or load a model or policy that uses your own reducer.
REDUCERS = Registry[type[Reducer]]("token reducer", ClassAttention, AttentionReceived, ToMe, Ward)


class PolicyReader(TextReader):
    """A parser for policies, with one method per rule of the grammar (see the module's docstring)."""

    noun, plural, examples, signs = "policy", "Policies", EXAMPLES, "():,=/@"
    nested = Reducer

    def read_policy(self) -> TokenPolicy:
        reducer = self.read_reducer()
        self.expect(":", "':' and the keep ratio")
        # The parser only sees `@every` after the number, so it first reads the number as a ratio and keeps its token.
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
    """Parses a policy, NAME[(knob=value,...)]:RATIO@LAYER,LAYER,... or NAME:N@every.

    `ward:0.7@4,7,10` keeps 70 % of the remaining patches before the layers 4, 7 and 10. `class_attention:0.8/0.5@4,7`
    keeps 80 % of the image's patches before layer 4 and 50 % before layer 7. `tome:13@every` removes 13 patches before
    every layer except the first.

    Raises:
        InvalidInput: The text is not a policy. The message points to the error in the text.
        UnknownName: No reducer is registered under this name.
    """
    return PolicyReader(text).read_policy()


def parse_reducer(text: str) -> Reducer:
    """Parses a reducer without a schedule, NAME[(knob=value,...)], e.g. `ward` or `ward(lengths=false)`.

    Raises:
        InvalidInput: The text is not a reducer.
        UnknownName: No reducer is registered under this name.
    """
    reader = PolicyReader(text)
    reducer = reader.read_reducer()
    reader.expect("end", "the end; a reducer is given here without stages")
    return reducer


def policy_from_dict(record: Mapping[str, Any]) -> TokenPolicy:
    """Builds a policy from the record that a saved model or a prescription contains."""
    return from_dict(record, (TokenPolicy, *REDUCERS.values()))
