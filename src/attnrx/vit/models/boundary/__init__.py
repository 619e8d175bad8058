"""Shared by public functions on models (verbs): working copies, loading, saving and acceleration."""
