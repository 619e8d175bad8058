"""The maps of a transformer block: the names that rules, decisions, realizations, plans and costs share."""

from collections.abc import Mapping

LINEAR_MAPS = ("fc1", "fc2")
"""The two linear maps of an MLP, in their order."""

OUTPUT_MAPS = ("vo", *LINEAR_MAPS)
"""Maps whose output rank is reduced: the value rows with the output projection ("vo"), and the maps of the MLP."""

HEADS, HIDDEN = "heads", "hidden"
UNIT_MAPS = (HEADS, HIDDEN)
"""Maps whose directions are fixed units, which are kept or removed whole: the heads of a layer, and the hidden units of
its MLP."""

LAYER_MAPS = ("qk", *OUTPUT_MAPS, *UNIT_MAPS)
"""The maps of a layer to which rules apply; "qk" are the query and key rows of every head."""

DEPTH, TOKENS = "depth", "tokens"
MAPS = (*LAYER_MAPS, DEPTH, TOKENS)
"""The names of all decisions of a prescription, as in its text form."""

COST_PARTS: Mapping[str, tuple[str, ...]] = {
    "qk": ("query_key", "scores", "diagonal", "fusion"),
    "vo": ("value_output", "read_out"),
    "mlp": ("mlp",),
}
"""The parts of `costs.LayerCosts` that depend on the rank of a map. Both maps of the MLP share theirs, and the number
of heads changes those of "qk" and "vo"."""

REALIZATIONS = ("compress", "mask")
"""How a prescription is realized (`by`): the removed parts are deleted, or set to zero with every shape kept. A form of
attention may add ways to delete them (`spec.Compression`)."""

FITS = ("repair", "distill")
"""The fits of the weights of a compressed model, in the order in which they are applied."""
