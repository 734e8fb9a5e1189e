"""What the operators and trained networks do: cost, precision, pictures."""
