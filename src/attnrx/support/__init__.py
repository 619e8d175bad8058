"""Files, processes, arguments, errors, progress: nothing here knows of attention."""
