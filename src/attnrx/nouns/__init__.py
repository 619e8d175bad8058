"""The objects that the main functions exchange, and their files: diagnosis, prescription, plan and evidence."""
