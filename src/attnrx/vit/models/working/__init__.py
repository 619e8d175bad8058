"""Working copies of models, with attnrx's attention, and the proof that they compute the same."""
