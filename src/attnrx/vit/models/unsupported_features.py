"""Detects features by which the attention of a model differs from plain softmax attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

# The attention of a library's own block, and what it is part of; not something that a user can create otherwise.
NOT_PLAIN = "Only softmax attention of queries and keys, rotated or not, with or without a bias, can be adopted."


@dataclass(frozen=True)
class Refusal:
    """Why a model cannot be adopted, and a remedy where the reason does not include one."""

    reason: str
    remedy: str = ""

    @property
    def is_of_class(self) -> bool:
        """Whether the architecture is not read, rather than a part or a setting that its user can change."""
        return self.remedy == NOT_PLAIN or self.reason.startswith(("the class ", "the block ", "the patch embedding "))


def without_reader(model: nn.Module) -> str:
    """Returns why a class of models cannot be read: what kind of network it is, as far as its parts show."""
    kinds = {type(part).__name__ for part in model.modules()}
    attention = {kind for kind in kinds if "Att" in kind and "Pool" not in kind}
    if any("Window" in kind or "Swin" in kind for kind in attention):
        described = "is a hierarchical Vision Transformer with attention inside windows, not between all patches"
    elif not attention and any(isinstance(part, nn.Conv2d) for part in model.modules()):
        # Mixers have one convolution, which makes the patches.
        convolutions = sum(isinstance(part, nn.Conv2d) for part in model.modules())
        described = "is a convolutional network without attention" if convolutions > 1 else "has no attention layers"
    else:
        described = "has no reader"
    return f"the class {type(model).__name__} {described}"


def changed_linears(module: nn.Module, names: tuple[str, ...]) -> Iterator[Refusal]:
    """Yields the projections that are not a plain nn.Linear: adapters, quantization, parametrizations."""
    for name in names:
        # The exact class: a subclass may compute something else, and quantized or adapted ones do.
        kind = type(module.get_submodule(name))
        if kind is not nn.Linear:
            shown = kind.__name__ if kind.__name__ != "Linear" else f"{kind.__module__}.Linear"
            yield Refusal(
                f"the projection {name} is a {shown}, not a plain Linear",
                "Merge adapters, undo quantization or parametrizations before adoption.",
            )


def unread_attention(attention: nn.Module, projections: tuple[str, ...], remedy: str = "") -> Iterator[Refusal]:
    """Yields why an attention module is not read: one of its projections, by their paths, lacks or is not a plain
    nn.Linear, or there is dropout, whose rate is an attribute or that of a module.
    """
    named = dict(attention.named_modules())
    missing = [path for path in projections if path not in named]
    if missing:
        yield Refusal(f"the attention {type(attention).__name__} has no module {', '.join(missing)}", remedy)
        return
    yield from changed_linears(attention, projections)
    # Not in timm's bias of positions, which stays.
    parts = [part for path, part in named.items() if not path.startswith("rel_pos")]
    rates = [getattr(part, name, 0.0) for part in parts for name in ("attention_dropout", "dropout", "dropout_prob")]
    rates += [part.p for part in parts if isinstance(part, nn.Dropout)]
    if any(isinstance(rate, float) and rate for rate in rates):
        yield Refusal(
            "dropout inside attention (create it without: attn_drop_rate=0 and proj_drop_rate=0 of timm, "
            "attention_dropout=0.0, hidden_dropout_prob=0.0 or attention_probs_dropout_prob=0.0 of others)"
        )


def model_name(model: nn.Module) -> str:
    """Returns the full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__name__}"
