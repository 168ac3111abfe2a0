"""A study: from a job to a winner."""
