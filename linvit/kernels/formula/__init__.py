"""Device code of users' formulas: traced from functions of torch, written in Triton and C++."""
