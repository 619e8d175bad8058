"""The layout of a model's tokens: prefix tokens and patches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLayout:
    """`prefix` tokens (class, distillation, registers) precede the `patches` and are never pruned.

    `class_token`: whether the first of them is a class token. `pooled`: the input of the classifier: "class" for prefix
    tokens only, "mean" for the mean of the patches, "max" for the maximum over the patch logits; "mean" and "max" with
    or without prefix tokens.
    """

    prefix: int
    patches: int
    class_token: bool
    pooled: str

    @property
    def tokens(self) -> int:
        """All tokens of an image."""
        return self.prefix + self.patches
