"""The commands of the laboratory, one file each, as in attnrx.cli.commands."""
