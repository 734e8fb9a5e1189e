"""Comparisons of many runs: over recipes and seeds, the study of the papers' claims, the demo."""

from linvit.studies.comparison import compare
from linvit.studies.papers import Study, study
from linvit.studies.table import Comparison, Row

__all__ = ["Comparison", "Row", "Study", "compare", "study"]
