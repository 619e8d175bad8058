"""Models of users' own: stated by a reader, found by their structure, or around a Vision Transformer."""
