"""The parts of a model: their paths, records, linear maps, inputs and token policies."""
