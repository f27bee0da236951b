"""What several tests have in common: checkpoints, oracles, environments, stand-ins for machines."""
