"""Computes the shapes of compressed attention and MLPs from names such as "cp:192", without computing weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnrx.support.errors import InvalidInput, NotSupported, UnknownName
from attnrx.vit.spec import BIASES, AttentionSpec

PATHWAY_FORMS = ("full", "truncatt", "cp", "irratt")


@dataclass(frozen=True)
class Compression:
    """Describes how every layer is compressed: its query-key pathway, its value-output pathway and its MLP.

    `qk` is "full", "truncatt:R" (R directions for each head), "cp:R" (R directions that all heads share) or "irratt:R"
    (R directions in blocks). With "irratt:R" there is one block per head, and every head mixes the score maps of all
    blocks. `vo` is the value dimension of each head. `mlp` is the rank of both linear layers of the MLP, each of which
    is stored as two factors. None means unchanged.

    Compression removes biases that are no longer needed. The query bias is kept, with one value per remaining
    direction. The key bias is dropped, because it adds a constant to every row of scores, which the softmax ignores.
    The value bias is folded into the output bias. If a rank keeps all directions or features, the shape does not
    change.
    """

    qk: str = "full"
    vo: int | None = None
    mlp: int | None = None

    def __post_init__(self):
        _parsed(self.qk)
        for name in ("vo", "mlp"):
            rank = getattr(self, name)
            if rank is not None and rank < 1:
                raise InvalidInput(f"{name}={rank}: give a rank of at least 1, or None for no compression.")

    def spec(self, full: AttentionSpec) -> AttentionSpec:
        """Returns the shape of a layer's attention after compression.

        Raises:
            InvalidInput: The layer is already compressed, or the rank is out of range.
            NotSupported: `qk` requests compression, but the scores are not plain dot products.
            UnknownName: `qk` names an unknown form.
        """
        form, rank = _parsed(self.qk)
        if (form != "full" or self.vo is not None) and not _is_full(full):
            raise InvalidInput(
                f"ranks {full.ranks} and value ranks {full.value_dims}: compressed already; pass the original shape."
            )
        if form != "full" and full.traits.has_strengths:
            raise NotSupported(
                f"{self.qk} rewrites plain dot products, and this attention is {full.form}; "
                "its directions are removed by a prescription instead."
            )
        return _read_out(full if form == "full" else _scored(full, form, rank), self.vo)

    def mlp_ranks(self, specs: Sequence[AttentionSpec]) -> tuple[tuple[int | None, int | None], ...] | None:
        """Returns the ranks of the MLP's two linear maps in every layer, or None if the MLPs are unchanged.

        Raises:
            InvalidInput: The rank is out of range for a layer.
        """
        if self.mlp is None:
            return None
        for spec in specs:
            _require("mlp", self.mlp, spec.width)
        return ((self.mlp, self.mlp),) * len(specs)


def _is_full(spec: AttentionSpec) -> bool:
    """Whether every head still has all its directions and value dimensions."""
    has_all_heads = spec.heads == tuple(range(len(spec.heads)))
    has_all_directions = all(rank == spec.original_rank for rank in spec.ranks)
    return has_all_heads and has_all_directions and all(rank == spec.head_dim for rank in spec.value_dims)


def _scored(spec: AttentionSpec, form: str, rank: int) -> AttentionSpec:
    heads, directions = len(spec.heads), sum(spec.ranks)
    # For shared directions, the largest useful rank is the number of directions of all heads together.
    _require(form, rank, spec.original_rank if form == "truncatt" else directions)
    # A rank that keeps all of the heads' own directions changes nothing.
    if form != "cp" and rank == (spec.original_rank if form == "truncatt" else directions):
        return spec
    smaller = replace(spec, biases=tuple(bias for bias in spec.biases if bias != "key"))
    if form == "truncatt":
        return replace(smaller, ranks=(rank,) * heads)
    # Directions are divided among the blocks as evenly as possible. The costs depend only on the total.
    size, remainder = divmod(rank, heads)
    blocks = tuple(size + (block < remainder) for block in range(heads))
    return smaller.with_shared_directions(rank, blocks if form == "irratt" else None)


def _read_out(spec: AttentionSpec, rank: int | None) -> AttentionSpec:
    if rank is None:
        return spec
    _require("vo", rank, spec.head_dim)
    if rank == spec.head_dim:
        return spec
    # The value bias moves to the output projection, which gets a bias if it had none. Names keep the order of BIASES.
    names = {*spec.biases, "output"} if spec.has_bias("value") else set(spec.biases)
    biases = tuple(bias for bias in BIASES if bias in names and bias != "value")
    return replace(spec, value_ranks=(rank,) * len(spec.heads), biases=biases)


def _require(name: str, rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise InvalidInput(f"{name} of rank {rank}: this layer has 1 to {most}.")


def _parsed(text: str) -> tuple[str, int]:
    form, colon, rank = text.partition(":")
    if form not in PATHWAY_FORMS:
        raise UnknownName("form of query and key", form, PATHWAY_FORMS)
    if form == "full" and not colon:
        return form, 0
    if form == "full" or not rank.isdecimal():
        raise InvalidInput(f"{text!r}: write 'full', or a form and its rank, e.g. 'irratt:192'.")
    return form, int(rank)
