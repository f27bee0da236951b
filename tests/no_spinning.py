"""Have vLLM's processes wait for each other's messages without spinning.

After each message a reader looks for the next one in a loop for a second, which costs a GPU's host
nothing. The tests have more such processes than cores.
"""

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SpinCondition.__init__.__defaults__ = (0.01,)  # busy_loop_s
