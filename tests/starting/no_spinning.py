"""Have vLLM's processes wait for each other's messages without spinning.

After each message a reader looks for the next one in a loop for a second, which costs a GPU's host
nothing. The tests have more such processes than cores.

Then it waits for a ping, and for no limited time. vLLM drops a ping where another is on its way, or the
reader's subscription has not arrived yet: rare after a second of looking, not after a hundredth. So the
reader looks again several times a second.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

LOOK_MS = 200
wait_for_ping = SpinCondition.wait


def wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    """Wait for a ping, but not for long: who calls this then looks for a message, and waits again."""
    wait_for_ping(condition, LOOK_MS if timeout_ms is None else min(timeout_ms, LOOK_MS))


SpinCondition.__init__.__defaults__ = (0.01,)  # busy_loop_s
SpinCondition.wait = wait
