"""Families for users' own models, which attnrx reads by a `Reader` or by their structure."""
