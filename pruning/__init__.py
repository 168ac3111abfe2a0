"""Pruning: the ledger prices candidates, refuses what cannot work and says why in numbers.

Knows the vocabulary (``search_space``) and nothing of Ray, Optuna's storage, MLflow or the trial runner.
"""
