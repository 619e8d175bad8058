"""Families of other libraries: timm, transformers, torchvision, open_clip."""
