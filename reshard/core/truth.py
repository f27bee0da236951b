"""Results of comparisons, which have to be asked for what was found."""


class NoTruthValue:
    """A result that Python does not take for true because it is an object: ``assert reshard.diff(a, b)`` would pass
    whatever differs. `question` names the property to ask instead."""

    question = "ok"

    def __bool__(self) -> bool:
        raise TypeError(f"a {type(self).__name__} is neither true nor false: ask for its .{self.question}")
