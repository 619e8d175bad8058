"""A generated sweep of broken and odd inputs to everything that a user touches, by surface.

A surface draws a case from its number alone, so a case of a failed test is made again by its number:

    PYTHONPATH=src:tests python -m support.sweep records 17
"""
