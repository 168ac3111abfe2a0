"""Validation: the ledger against tables of published measurements."""
