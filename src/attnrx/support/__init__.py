"""General tools for files, processes, arguments, errors and progress. No module here depends on attention."""
