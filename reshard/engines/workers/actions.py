"""The words for what a call that updates an engine's weights does."""

REFIT, BEGIN, SWITCH, DROP, ROLL_BACK = ACTIONS = ("refit", "begin", "switch", "drop", "roll back")
HOLDS = "say what is served"  # which changes nothing
# Of deltas of a chain.
READ, IS_READ, WRITE, DROP_DELTAS = "read deltas", "deltas are read", "write deltas", "drop deltas"
