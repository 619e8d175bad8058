"""The parts of a model: where they are and what they are (records, maps, inputs, token policies)."""
