"""What the tokens of a model are: patches, and those that stand before them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLayout:
    """`prefix` tokens (class, distillation, registers) stand before the `patches`, and are never dropped.

    `class_token` says whether the first of them is a class token; `pooled` how the answer is read off the tokens:
    "class" from tokens before the patches alone, "mean" from the mean of the patches, "max" from the largest of what is
    read off each patch; both alone or beside.
    """

    prefix: int
    patches: int
    class_token: bool
    pooled: str

    @property
    def tokens(self) -> int:
        """All tokens of an image."""
        return self.prefix + self.patches
