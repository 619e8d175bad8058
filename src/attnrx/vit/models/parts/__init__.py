"""Where the parts of a model are, and what they are: records, maps, inputs, token policies."""
