"""The maps of a transformer block, under the names that rules, decisions, realizations, plans and costs share."""

from collections.abc import Mapping

LINEAR_MAPS = ("fc1", "fc2")
"""The two linear maps of an MLP, in order."""

OUTPUT_MAPS = ("vo", *LINEAR_MAPS)
"""Maps with a reducible output rank: the value rows together with the output projection ("vo"), and the MLP's maps."""

HEADS, HIDDEN = "heads", "hidden"
UNIT_MAPS = (HEADS, HIDDEN)
"""Maps with fixed units as directions, each kept or removed whole: a layer's heads, and its MLP's hidden units."""

LAYER_MAPS = ("qk", *OUTPUT_MAPS, *UNIT_MAPS)
"""The maps of a layer that rules apply to. "qk" are the query and key rows of every head."""

DEPTH, TOKENS = "depth", "tokens"
MAPS = (*LAYER_MAPS, DEPTH, TOKENS)
"""The names of all decisions in a prescription, in the order of its text form."""

COST_PARTS: Mapping[str, tuple[str, ...]] = {
    "qk": ("query_key", "scores", "diagonal", "fusion"),
    "vo": ("value_output", "read_out"),
    "mlp": ("mlp",),
}
"""The parts of `costs.LayerCosts` that depend on the rank of a map. Both maps of the MLP share one part. The number of
heads changes the parts of "qk" and "vo"."""

REALIZATIONS = ("compress", "mask")
"""How a prescription is realized (`by`). "compress" deletes removed parts, and "mask" sets them to zero and keeps every
shape. A form of attention may add other ways to delete them (`spec.Compression`)."""

FITS = ("repair", "distill")
"""The fits of a compressed model's weights, in the order in which they are applied."""
