"""Detectors and segmentors on any four-stage backbone."""
