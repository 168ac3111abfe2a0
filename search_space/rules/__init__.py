"""Validity rules: what a framework of a given version refuses, as data."""

from search_space.rules.risks import RISKS
from search_space.rules.rule import judge
from search_space.rules.rule import Judgement
from search_space.rules.rule import Rule
from search_space.rules.table import RULES


__all__ = ["RISKS", "RULES", "Judgement", "Rule", "judge"]
