"""The commands of the laboratory, one file each, as modules of attnrx.commands."""
