"""Time and memory of the operator, of whole networks and of training steps, side by side with named peers."""
