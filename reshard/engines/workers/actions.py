"""The words for what a call that updates an engine's weights does."""

REFIT, BEGIN, SWITCH, DROP, ROLL_BACK = ACTIONS = ("refit", "begin", "switch", "drop", "roll back")
