"""Ways of bytes between a trainer's rank and an inference rank."""
