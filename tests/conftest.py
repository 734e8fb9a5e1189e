"""Puts this folder on the path, so that tests anywhere below can import its helpers."""
