"""What only our own pages need: their studies, their benchmarks, the queue of GPU jobs, and what they compute.

Not part of the wheel: it runs in a clone of the repository, from its root, by `python -m evidence`.
"""
