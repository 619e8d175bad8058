"""The verbs: one call of a user is one file here, from its arguments to its result."""
