"""Where task, network and data meet: train, load, evaluate, predict, generate, analyze, report."""
