"""The boundary of verbs: working copies in, models of the user's class out; loading, saving, acceleration."""
