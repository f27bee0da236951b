"""In the place of ROLL's worker that trains."""

from roll.distributed.executor.worker import Worker


class ActorWorker(Worker):
    pass
