"""Detects features by which the attention of a model differs from plain softmax attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

NOT_PLAIN = "Only plain softmax attention, whose scores are bilinear in the tokens, can be adopted."
POOLING = "attn_pool"  # a pooling head before the classifier, not the attention of a layer


@dataclass(frozen=True)
class Refusal:
    """Why a model cannot be adopted, and a remedy where the reason does not include one."""

    reason: str
    remedy: str = ""


# The attributes of modules that show a feature, unless they are None or an identity; the first group is read of any
# module, the second of attention modules only.
MODEL_FEATURES: dict[str, tuple[str, ...]] = {
    "rotary positions": ("rope", "rope_embed", "rope_embeddings", "rotary_emb"),
    "relative position bias": ("rel_pos_bias", "shared_rel_pos"),
    "attention pooling before the classifier": (POOLING,),
}
ATTENTION_FEATURES: dict[str, tuple[str, ...]] = {
    "QK-norm": ("q_norm", "k_norm", "q_layernorm", "k_layernorm"),
    "a norm between attention and output projection": ("norm",),
    "a gate on the output of attention": ("gate",),
    "relative position bias": ("rel_pos", "relative_position_bias", "relative_position_bias_table"),
    "differential attention": ("lambda_q1", "lambda_a"),
    "talking heads": ("proj_l", "proj_w"),
}


def features(model: nn.Module) -> Iterator[Refusal]:
    """Yields the features by which attention anywhere in the model is not plain."""
    for name, module in model.named_modules():
        is_attention = "Att" in type(module).__name__ and POOLING not in name.split(".")
        tables = (MODEL_FEATURES, ATTENTION_FEATURES) if is_attention else (MODEL_FEATURES,)
        for feature, attributes in (row for table in tables for row in table.items()):
            if not all(isinstance(getattr(module, attribute, None), nn.Identity | None) for attribute in attributes):
                yield Refusal(feature, "" if POOLING in attributes else NOT_PLAIN)


def changed_linears(module: nn.Module, names: tuple[str, ...]) -> Iterator[Refusal]:
    """Yields the projections that are not a plain nn.Linear: adapters, quantization, parametrizations."""
    for name in names:
        kind = type(getattr(module, name))
        if kind is not nn.Linear:
            yield Refusal(
                f"the projection {name} is a {kind.__name__}, not a plain Linear",
                "Merge adapters, undo quantization or parametrizations before adoption.",
            )


def model_name(model: nn.Module) -> str:
    """Returns the full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__name__}"
