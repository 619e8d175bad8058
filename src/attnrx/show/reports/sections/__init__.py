"""The sections of a report: each function maps the report content to a section, or None without data."""
