"""Tests of tuner.records.tracking."""
