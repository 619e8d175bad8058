"""The commands of the laboratory, one module per command."""
