"""Diagnostics: read-only measurements of attention, from its spectra and from what its layers compute. They see no model."""
