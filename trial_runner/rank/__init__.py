"""Everything that runs inside a training process; imports nothing of ours but ``trial_runner`` and ``search_space``."""
