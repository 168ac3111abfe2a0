"""Evidence: the winner against the baseline, and its commit."""
