"""Replay: search strategies against measured tables, where each group of rows answers as a cluster would."""
