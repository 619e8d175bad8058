"""Names of the maps in a transformer block that attnrx can compress, e.g. "qk" for queries and keys."""

from collections.abc import Mapping

LINEAR_MAPS = ("fc1", "fc2")
"""The two linear maps of an MLP, in order."""

OUTPUT_MAPS = ("vo", *LINEAR_MAPS)
"""Maps whose output rank can be reduced. "vo" is the product of the value and output projections of a head."""

HEADS, HIDDEN = "heads", "hidden"
UNIT_MAPS = (HEADS, HIDDEN)
"""Maps whose directions are whole units: the heads of a layer, and the hidden units of its MLP."""

LAYER_MAPS = ("qk", *OUTPUT_MAPS, *UNIT_MAPS)
"""All maps of a layer that rules can reduce. "qk" means the query and key rows of every head."""

DEPTH, TOKENS = "depth", "tokens"
MAPS = (*LAYER_MAPS, DEPTH, TOKENS)
"""Everything that a prescription can decide, in the order of its text form."""

COST_PARTS: Mapping[str, tuple[str, ...]] = {
    "qk": ("query_key", "scores", "diagonal", "fusion"),
    "vo": ("value_output", "read_out"),
    "mlp": ("mlp",),
}
"""The parts of `costs.LayerCosts` that get cheaper if the rank of "qk", "vo" or the MLP's maps is reduced. Removing
heads also makes the parts of "qk" and "vo" cheaper."""

REALIZATIONS = ("compress", "mask")
"""The values of `by` in `realize`. "compress" deletes what a prescription removes. "mask" sets it to zero and keeps all
shapes. A form of attention can register more ways (`spec.Compression`)."""

FITS = ("repair", "distill")
"""The ways to fit a compressed model's weights, in the order in which they run."""
