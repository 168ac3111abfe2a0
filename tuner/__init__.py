"""The tuner: wires search space, ledger, trials, records and evidence into studies and commands."""
