"""What the workers of any engine can be called for: refits, and chains of versions."""
