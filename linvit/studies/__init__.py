"""Many runs side by side: comparisons, the study of the papers' claims, the demo."""
