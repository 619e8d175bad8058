"""What travels between the verbs, each with its file format: diagnosis, prescription, plan, evidence."""
