"""The vocabulary of ledgertune: jobs, knobs, candidates, model shapes, hardware, the pool of legal candidates.

This package imports none of the project's other packages.
"""
