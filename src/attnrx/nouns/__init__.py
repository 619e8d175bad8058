"""The objects that the main functions exchange, with their files: diagnosis, prescription, plan and evidence."""
