"""Text and other tokens."""
