"""Readers: one storage format each, from a place to encoded images and labels."""
