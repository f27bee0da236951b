"""What a training checkpoint has besides weights: the optimizer's states, and how far the training is."""
