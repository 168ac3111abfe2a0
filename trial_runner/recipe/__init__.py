"""Candidate to torchtitan config function, and what a user's own function says."""
