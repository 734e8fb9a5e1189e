"""Analysis of operators and trained networks: cost, ranks, scores; figures and pages."""
