"""Probing the devices of a job, and what the ledger learns from it."""
