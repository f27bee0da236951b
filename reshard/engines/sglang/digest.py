"""The digest of what a running SGLang serves.

SGLang's calls return nothing to whoever makes them. So the caller meets the schedulers at an address, as member 0, and
each says there what it holds.
"""

import json
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.comm.hosts import free_address
from reshard.comm.secret import new_secret
from reshard.core.limits import check_seconds
from reshard.digests.result import Digest
from reshard.engines.digest import digest_of_answers
from reshard.engines.sglang import calls
from reshard.storage.io.casts import float_dtype

CALL = "reshard_digest"


def digest(engine: Any, dtype: object = None, address: str | None = None, timeout: float = 600.0) -> Digest:
    """Return the digest of what an ``sglang.Engine`` serves, or the server at an address ``http://HOST:PORT``.

    Its ranks reach this process at `address`, a ``host:port``, by default a free port of this host. `timeout` is in
    seconds. With pipeline stages it refuses requests while they read. Raises ReshardError as
    `reshard.engines.digest.digest_of_engine` does.
    """
    check_seconds(timeout, "timeout")
    target = float_dtype(dtype)
    name = None if target is None else target.name
    options = {"address": address or free_address("127.0.0.1"), "dtype": name, "timeout": timeout,
               "secret": new_secret()}  # fmt: skip
    if isinstance(engine, str):
        calls.check_plugin(engine)
        size = calls.server_ranks(engine)
        return _met(options, size, lambda: calls.ask_digest(engine, options, timeout), engine)
    arguments = engine.server_args
    size = arguments.tp_size * arguments.pp_size
    return _met(options, size, lambda: calls.call(engine, CALL, **options), "the engine")


def _met(options: dict[str, Any], size: int, send: Callable[[], None], where: str) -> Digest:
    """Return the digest of what schedulers say once `send` has asked them."""
    answers: Future[list[Any]] = Future()

    def listen() -> None:
        try:
            group = RefitGroup.join(options["address"], 0, size + 1, options["timeout"], options["secret"])
            with group.transaction("a digest"):
                payloads = group.gather("digest", b"null")[1:]
                group.commit()
            group.close()
            answers.set_result([json.loads(payload) for payload in payloads])
        except BaseException as error:
            answers.set_exception(error)

    # What sending raises is raised at once: nobody waits for schedulers that were not asked.
    Thread(target=listen, name="reshard-digest", daemon=True).start()
    send()
    return digest_of_answers(answers.result(options["timeout"]), options["dtype"], where)
