"""The ledger: what a candidate needs and takes, term by term, as formulas on arrays."""
