"""The boundary of verbs: it makes working copies, returns models of the user's class, loads, saves and accelerates."""
