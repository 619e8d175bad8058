"""Working copies of models with attnrx attention, and checks that their outputs equal the original's."""
