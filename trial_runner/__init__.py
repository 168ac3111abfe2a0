"""The trial runner: one candidate becomes N training processes and comes back as measured facts."""
