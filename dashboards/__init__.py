"""Views of recorded studies; reads ``tuner.records`` only."""
