"""What the operators and trained networks do: cost, ranks, scores, figures."""
