"""GPU kernels (Triton) of the operator."""
