"""Code that public functions share: it makes working copies of models, and loads, saves and accelerates models."""
