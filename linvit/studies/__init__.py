"""Comparisons of many runs over recipes and seeds, the plan of a linearization, the demo."""

from linvit.studies.comparison import compare
from linvit.studies.hugging_face import plan_for_transformers
from linvit.studies.linearization import plan_linearization
from linvit.studies.plan import LinearizationPlan
from linvit.studies.table import Comparison, Row

__all__ = ["Comparison", "LinearizationPlan", "Row", "compare", "plan_for_transformers", "plan_linearization"]
