"""The trainer's side of vLLM's weight transfer with the backend ``reshard``.

    transfer = WeightTransfer(MegatronModel(models), HttpClient("http://127.0.0.1:8000"), "127.0.0.1:29600")
    for step in range(steps):
        train(models)
        transfer.send(version=step)

Every rank of the trainer makes one and calls `WeightTransfer.send`. The first rank calls the
engines, by vLLM's own protocol; all ranks meet the engines' workers at the address, and give their
own shards. The engine's side is `reshard.integrations.vllm.worker`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, Protocol

import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.group import MOST_MEMBERS, check_rank
from reshard.comm.http import EngineServer
from reshard.comm.ranks import on_first_rank
from reshard.comm.secret import given_secret, new_secret
from reshard.core.errors import OptionError, ReshardError, first_line, listed
from reshard.core.limits import check_number, check_seconds
from reshard.integrations.members import Held, finish
from reshard.integrations.switching import (
    GO_ON,
    KEEP,
    Switching,
    begin,
    check_switches,
    drop,
    switch_all,
)
from reshard.integrations.sync import Calls, Meeting
from reshard.refit.connecting import connect
from reshard.refit.link import Link, RefitReport
from reshard.refit.options import ConnectOptions, check_member_name
from reshard.refit.pending.refits import Begun
from reshard.refit.pending.report import BegunReport
from reshard.refit.trainer import Trainer

DEV_MODE = 'start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config \'{"backend": "reshard"}\''


class EngineClient(Protocol):
    """The calls of an engine: vLLM's own ``VLLMWeightSyncClient`` (``HTTPVLLMWeightSyncClient``,
    ``RayVLLMWeightSyncClient``), or a client of this module."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer, and connect."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take the weights; return when they have arrived."""

    def finish_weight_update(self) -> None:
        """End an update. A method that takes a ``weight_version``, a text, gets it: from 0.27 on
        vLLM tells which version made an answer."""


class HttpClient(EngineServer):
    """A ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, called by its routes. `timeout` is in
    seconds; errors and logs call the engine by its `name`, such as that of its pod."""

    hands_on = True  # see `reshard.integrations.members.Member.hands_on`

    def __init__(self, url: str, timeout: float = 600.0, name: str | None = None) -> None:
        check_seconds(timeout, "timeout of HttpClient")
        check_member_name(name, "name of HttpClient")
        super().__init__(url, timeout, DEV_MODE)
        self.name = name

    def world_size(self) -> int:
        """Return how many workers it has, over all of its data parallel ranks."""
        answer = self._call("GET", "get_world_size")
        return _workers_of(answer.get("world_size") if isinstance(answer, dict) else None, self.url)

    def serves(self, adapter: str | None = None) -> int | None:
        """Return the version of the weights, or of an adapter, that all of its workers serve; None if they serve no
        version."""
        held = self.holds(adapter)
        return None if held is None else held.version

    def holds(self, adapter: str | None = None) -> Held | None:
        """Return what all of its workers serve, of the weights or of an adapter; None if they serve no version."""
        return held_by(self._states(), adapter)

    def has_whole_weights(self) -> bool:
        """Return True if no refit has left the weights of any of its workers half written."""
        states = self._states() or []
        return bool(states) and all(state is None or state.get("ready") for state in states)

    def _states(self) -> Any:
        """Return what its workers say of what they hold; None for any other answer."""
        answer = self._call("POST", "collective_rpc", {"method": "reshard_state"})
        return answer.get("results") if isinstance(answer, dict) else None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("POST", "init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update without a checkpoint format: for one, vLLM 0.24 and 0.25 would put the weights on the
        meta device."""
        self._call("POST", "start_weight_update", {"is_checkpoint_format": False})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("POST", "update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update. Older versions of vLLM ignore the version."""
        named = {} if weight_version is None else {"weight_version": weight_version}
        self._call("POST", "finish_weight_update", named)

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect it from the trainer, and free what it has mapped; from vLLM 0.32 on."""
        self._call("POST", "shutdown_weight_transfer_engine", {})

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        """Let no request run until `resume`: running requests wait (``keep``), end first (``wait``)
        or are dropped (``abort``). With `clear_cache` vLLM drops its prefix cache, where no requests have parts of
        it."""
        self._call("POST", f"pause?mode={mode}&clear_cache={str(clear_cache).lower()}", {})

    def resume(self) -> None:
        """Let requests run again."""
        self._call("POST", "resume", {})

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Drop what was computed from the old weights. Requests that run are computed anew as far as they have come;
        `external` drops what a KV connector keeps, too.

        Raises ReshardError if vLLM says that it has not.
        """
        route = f"reset_prefix_cache?reset_running_requests=true&reset_external={str(external).lower()}"
        answer = self._call("POST", route, {})
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ReshardError(
                f"{self.url} has not reset its prefix cache, and would answer from the old weights: pause it before, "
                f"and reset it again"
            )


class LlmClient:
    """An ``LLM`` of this process, whose workers run in other processes; `name` is as in `HttpClient`."""

    def __init__(self, llm: Any, name: str | None = None) -> None:
        check_member_name(name, "name of LlmClient")
        self.llm, self.name = llm, name

    def world_size(self) -> int:
        """Return how many workers it has."""
        return int(self.llm.llm_engine.vllm_config.parallel_config.world_size_across_dp)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update without a checkpoint format: for one, vLLM 0.24 and 0.25 would put the weights on the
        meta device."""
        try:
            self.llm.start_weight_update(is_checkpoint_format=False)
        except TypeError:
            self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update. Older versions of vLLM ignore the version."""
        finish(self.llm, weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Disconnect it from the trainer, and free what it has mapped."""
        self.llm.collective_rpc("reshard_close")


class WeightTransfer:
    """A trainer's rank, connected to one or more engines.

    `clients` are the engines; `engine_ranks` is how many workers each has. Without `engine_ranks`
    the engines are asked: by the first rank for all if the trainer's ranks are torch's process
    group, else by every rank. `address` is a ``host:port`` that all processes reach; the first rank
    serves there. `rank` and `ranks` count the trainer, by default torch's process group. Other
    arguments are those of `reshard.refit.connect`, `timeout` is that of `RefitGroup.join`.

    `secret` is that of `RefitGroup.join`; the engines get it with the address. The first rank makes
    one if the trainer's ranks are torch's process group, or if there is only one rank.

    Raises ReshardError on all sides if they do not fit, before a byte moves.
    """

    def __init__(
        self, source: Trainer | Callable[[], Trainer], clients: EngineClient | Sequence[EngineClient], address: str, *,
        engine_ranks: Sequence[int] | None = None, rank: int | None = None, ranks: int | None = None,
        timeout: float = 60.0, secret: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        check_seconds(timeout, "timeout")
        connecting = ConnectOptions(**options).checked()
        self.rank = rank if rank is not None else _of_group(dist.get_rank, 0)
        trainers = ranks if ranks is not None else _of_group(dist.get_world_size, 1)
        self.clients = _clients(clients)
        in_group = rank is None and ranks is None and trainers > 1
        check_rank(self.rank, trainers)
        taking = partial(_check_all_take, self.clients, connecting.adapter)
        sizes, secret = _agree(self.clients, engine_ranks, in_group, trainers == 1, secret, taking)
        size = trainers + sum(sizes)
        firsts = [trainers + sum(sizes[:index]) for index in range(len(sizes))]

        meeting = Meeting(address, size, timeout, secret)

        def join(index: int) -> None:
            name = getattr(self.clients[index], "name", None)
            arguments = meeting.arguments(firsts[index]) | {"name": name} | with_adapter(connecting.adapter)
            self.clients[index].init_weight_transfer_engine(arguments)

        self._beginning = Calls()  # of the refit that was begun last
        self.before: int | None = None  # the version that engines serve before they switch to it
        self.is_begun = False  # and neither switched to nor given up
        self.ticket: str | None = None  # with which it was begun
        calls = self._call(join)
        members = meeting.join(self.rank)
        try:
            self.link = calls.alongside(members, lambda: connect(members, source, None, connecting))
        except BaseException:
            members.close()  # the address is the caller's, who may meet there again
            raise

    def send(self, version: int | None = None, verify: bool = False) -> RefitReport:
        """Refit all engines; see `Link.refit`. Returns when they have the weights.

        Engines keep what they have computed from the old weights: pause them before, and reset
        their prefix cache. A call of an engine that comes late, when all have given up, is refused there, and so
        is one of a connection after which the engine has made another.
        """
        info = self._info(version, verify)

        def update(index: int) -> None:
            self.clients[index].start_weight_update()
            self.clients[index].update_weights(info)

        report = self._call(update).alongside(self.link.group, lambda: self.link.refit(version, verify))
        version_text = str(report.version)
        calls = self._call(lambda index: finish(self.clients[index], version_text))
        calls.wait_all(self.link.group.timeout)
        return report

    def begin(self, version: int | None = None, verify: bool = False) -> Begun:
        """Begin a refit of all engines, which go on serving; see `Link.begin_refit`: this rank's weights may change
        when it returns. `switch` makes the engines serve it."""
        info = self._info(version, verify)
        self.is_begun, self.ticket = True, info["ticket"]
        self._beginning = self._call(lambda index: begin(self.clients[index], info))
        return self.link.begin_refit(version, verify, called=self._beginning.first_failure)

    def _info(self, version: int | None, verify: bool) -> dict[str, Any]:
        """Return what engines are called with for the next refit, once nothing else is begun."""
        if isinstance(self.link, Link):
            self.link.check_open()  # before an engine hears of it
        if self.is_begun:
            self.give_up()
        return {"version": version, "verify": verify, "ticket": self.link.group.ticket()}

    def arrived(self) -> BegunReport:
        """Wait until all engines have what was begun, or nobody has, and they are told to forget it; see
        `Begun.wait`."""
        if not self.is_begun:
            raise ReshardError(
                "nothing is begun, or it was given up, switched to, or sent since: begin first"
            )
        try:
            report = self.link.begun.last().wait()
            self._beginning.wait_all(self.link.group.timeout)
        except BaseException:
            self.give_up()
            raise
        self.before = report.before
        if not report.is_pending:
            self.give_up()
        return report

    def give_up(self) -> None:
        """Have engines forget what was begun, which they will not switch to. No call is made after it has returned:
        an engine would take it for the end of a later update."""
        self.is_begun, over = False, Event()
        self.link.begun.settle()
        calls = self._call(lambda index: drop(self.clients[index], self.ticket, over.is_set))
        calls.errors(self.link.group.timeout)
        over.set()

    def switch(self, requests: str = GO_ON, caches: str = KEEP) -> int:
        """Make all engines serve what was begun, once all have it; return its version. For the arguments see
        `reshard.integrations.switching.Switching`. All ranks may call it, and the first one's engines switch.

        Raises ReshardError if nothing is pending, or one cannot switch: then those that could are rolled back.
        """
        how = Switching(requests, caches).checked()
        check_switches(self.clients, how)  # while what was begun can still be switched to in another way
        report = self.arrived()
        if not report.is_pending:
            raise ReshardError(f"no version is pending: {report.reason}; send all")
        self.is_begun = False  # whoever does not switch forgets it
        clients = {_name(client, index): client for index, client in enumerate(self.clients)}
        if self.rank or not clients:
            return report.version
        served, failed = switch_all(
            clients, report.version, self.ticket, self.before, how, self.link.group.timeout
        )
        if failed:
            said = listed([f"{name} ({why})" for name, why in failed.items()], 3)
            raise ReshardError(
                f"{said} did not switch to version {report.version}; others serve version {served}"
            )
        return report.version

    def close(self) -> None:
        """Unmap the peers' memory, free what was staged, and leave the meeting: another may be held at the
        address."""
        try:
            self.link.close()
        finally:
            self.link.group.close()

    def _call(self, call: Callable[[int], None]) -> Calls:
        """Call each engine by its index, on the first rank; the calls run while this rank does its part."""
        if self.rank:
            return Calls({})
        named = ((index, _name(client, index)) for index, client in enumerate(self.clients))
        return Calls({name: in_background(partial(call, index)) for index, name in named})


def _clients(value: Any) -> list[EngineClient]:
    """Return a list of clients. Raises ReshardError if one is not a client of an engine."""
    clients = list(value) if isinstance(value, list | tuple) else [value]
    for client in clients:
        if not hasattr(client, "init_weight_transfer_engine"):
            raise ReshardError(
                f"a client is a {type(client).__name__}: give reshard.integrations.HttpClient(url), LlmClient(llm) "
                f"or one of vLLM's"
            )
    return clients


def _check_all_take(clients: Sequence[EngineClient], adapter: str | None) -> None:
    for client in clients:
        check_takes(client, adapter)


def check_takes(client: Any, adapter: str | None) -> None:
    """Raise OptionError if there is an `adapter`, and the engine of a client takes none."""
    if adapter is not None and not getattr(client, "takes_adapters", True):
        raise OptionError(
            f"{client.url} is an SGLang, whose LoRA adapters are not refitted: serve adapter {adapter!r} with a vLLM "
            f"that is started with --enable-lora"
        )


def _name(client: EngineClient, index: int) -> str:
    if name := getattr(client, "name", None):
        return f"engine {name}"
    return f"engine {index} ({getattr(client, 'url', type(client).__name__)})"


def _agree(
    clients: Sequence[EngineClient],
    engine_ranks: Sequence[int] | None,
    in_group: bool,
    alone: bool,
    secret: str | None,
    check: Callable[[], None],
) -> tuple[list[int], str | None]:
    """Return how many workers each engine has, and the secret of all members, once `check` has raised nothing.

    If the trainer's ranks are torch's process group, its first rank finds out and makes the secret,
    so that every rank raises if an engine cannot be asked.
    """

    def find_out() -> tuple[list[int], str | None]:
        check()
        shared = given_secret(secret)
        if shared is None and (alone or in_group):
            shared = new_secret()
        sizes = (
            _checked_sizes(engine_ranks) if engine_ranks is not None else list(map(count_workers, clients))
        )
        return sizes, shared

    return on_first_rank(find_out) if in_group else find_out()


def _checked_sizes(sizes: Any) -> list[int]:
    if not isinstance(sizes, list | tuple):
        raise ReshardError(f"engine_ranks is {sizes!r:.80}; it is a list of how many workers each engine has")
    return [_workers_of(size, f"engine {index}") for index, size in enumerate(sizes)]


def count_workers(client: Any) -> int:
    """Return how many workers an engine has. Raises ReshardError if its client cannot say."""
    if not hasattr(client, "world_size"):
        raise ReshardError(
            f"{type(client).__name__} does not say how many workers its engine has: give engine_ranks"
        )
    try:
        count = client.world_size()
    except ReshardError:
        raise
    except (
        Exception
    ) as error:  # of whatever kind a user's own client raises: the other ranks wait for the answer
        raise ReshardError(
            f"{type(client).__name__} does not say how many workers its engine has ({first_line(error)}): "
            f"give engine_ranks"
        ) from error
    return _workers_of(count, type(client).__name__)


def with_adapter(adapter: str | None) -> dict[str, str]:
    """Return the argument with which an engine connects for an adapter; nothing without one."""
    return {} if adapter is None else {"adapter": adapter}


def held_by(states: Any, adapter: str | None = None) -> Held | None:
    """Return what all of an engine's workers serve by their states, of the weights or of an adapter; None for any other
    answer."""
    known = [state for state in states or [None] if isinstance(state, dict) and state.get("ready")]
    if adapter is not None:
        known = [state["adapters"][adapter] for state in known if adapter in state.get("adapters", {})]
    held = {(state.get("version"), str(state.get("origin", ""))) for state in known}
    if len(held) != 1 or len(known) != len(states):
        return None
    [(version, origin)] = held
    return Held(version, origin) if isinstance(version, int) else None


def _workers_of(count: Any, who: str) -> int:
    """Return a number of workers, which `who` has given. Raises ReshardError if it is not a number."""
    check_number(count, f"the number of workers of {who}", MOST_MEMBERS)
    workers: int = count
    return workers


def _of_group(count: Callable[[], int], alone: int) -> int:
    """Return a count of torch's process group, or `alone` without one."""
    return count() if dist.is_initialized() else alone
