"""The cluster: Ray nodes, gangs placed on them, agents that hold the ranks."""
