"""Ctrl-C where something has to be waited for first."""

from collections.abc import Callable


def wait_out(wait: Callable[[], object]) -> None:
    """Call `wait` until it returns, again after each Ctrl-C that comes meanwhile; then raise that."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait()
            break
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt
