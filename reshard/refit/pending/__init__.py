"""Refits that are begun while both sides go on: what changed is packed, travels in the background, and lies beside the
weights that an engine serves, as its *pending* version, until the engine switches to it."""
