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


# Attributes of attention modules, and of any module. An attribute that is None or an identity counts as absent.
ATTENTION_FEATURES: dict[str, str] = {
    "q_norm": "QK-norm",
    "k_norm": "QK-norm",
    "q_layernorm": "QK-norm",
    "k_layernorm": "QK-norm",
    "norm": "a norm between attention and output projection",
    "gate": "a gate on the output of attention",
    "rel_pos": "relative position bias",
    "relative_position_bias": "relative position bias",
    "relative_position_bias_table": "relative position bias",
    "lambda_q1": "differential attention",
    "lambda_a": "differential attention",
    "proj_l": "talking heads",
    "proj_w": "talking heads",
}
MODEL_FEATURES: dict[str, str] = {
    "rope": "rotary positions",
    "rope_embed": "rotary positions",
    "rope_embeddings": "rotary positions",
    "rotary_emb": "rotary positions",
    "rel_pos_bias": "relative position bias",
    "shared_rel_pos": "relative position bias",
    POOLING: "attention pooling before the classifier",
}


def features(model: nn.Module) -> Iterator[Refusal]:
    """Yields the features by which attention anywhere in the model is not plain."""
    for name, module in model.named_modules():
        is_attention = "Att" in type(module).__name__ and POOLING not in name.split(".")
        table = {**MODEL_FEATURES, **ATTENTION_FEATURES} if is_attention else MODEL_FEATURES
        for attribute, feature in table.items():
            if not isinstance(getattr(module, attribute, None), nn.Identity | None):
                yield Refusal(feature, "" if attribute == POOLING else NOT_PLAIN)


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
