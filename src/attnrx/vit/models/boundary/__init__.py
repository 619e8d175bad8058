"""The boundary of verbs: working copies, models of the user's own class, loading, saving and acceleration."""
