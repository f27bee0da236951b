"""What a training checkpoint has besides weights: the optimizer's states, and the progress of training."""
