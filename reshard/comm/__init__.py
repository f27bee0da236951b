"""Coordination of processes: authenticated connections to a hub, and a group of members that take
part in transactions over it."""
