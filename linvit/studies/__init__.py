"""Comparisons of many runs over recipes and seeds, the plan of a linearization, the demo."""

from linvit.studies.comparison import compare
from linvit.studies.linearization import LinearizationPlan, plan_linearization
from linvit.studies.table import Comparison, Row

__all__ = ["Comparison", "LinearizationPlan", "Row", "compare", "plan_linearization"]
