"""Users' own models: stated by a reader, found by their structure, or around a Vision Transformer."""
