"""Working copies, loading, saving and acceleration of models, which attnrx's public functions share."""
