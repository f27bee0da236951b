"""The adapter that serves a request: one that asks for a refitted adapter by its name gets the newest version,
and keeps it for life."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from reshard.core.errors import ReshardError


class Workers(Protocol):
    """The workers of an engine core, as its gate knows them."""

    def states(self) -> Sequence[dict[str, Any]]:
        """Return what each worker holds; see `reshard.engines.vllm.requests.gate.Gate.states`."""


def choose_version(request: Any, workers: Workers) -> None:
    """Give a request for a refitted adapter the id of the version that it asks for, by the adapter's name or by
    that of the version.

    Raises ReshardError if that may not be served, and for another adapter that has one of these ids.
    """
    asked = request.lora_request
    of_ranks = [state.get("adapters", {}) for state in workers.states()] if asked is not None else []
    if not any(of_ranks):
        return
    name = asked.lora_name.partition("@")[0]
    if name not in of_ranks[0]:
        _check_id(asked, of_ranks[0])
        return
    wanted = _newest(name, of_ranks) if asked.lora_name == name else asked.lora_name
    if not all(wanted in of_rank[name]["held"] for of_rank in of_ranks):
        raise ReshardError(_refusal(name, wanted, of_ranks))
    identity = of_ranks[0][name]["held"][wanted]
    if (asked.lora_name, asked.lora_int_id) != (wanted, identity):
        request.lora_request = _request_for(wanted, identity)


def withdrawn_requests(requests: Iterable[tuple[str, Any]], workers: Workers) -> dict[str, list[str]]:
    """Return the ids of unfinished requests, given with their adapters, whose version must not be served any more,
    by the sentence that says so."""
    of_ranks = [state.get("adapters", {}) for state in workers.states()]
    withdrawn = defaultdict(list)
    for identity, adapter in requests:
        name = adapter.lora_name.partition("@")[0] if adapter is not None else ""
        if name not in of_ranks[0]:
            continue
        if not all(adapter.lora_name in of_rank[name]["held"] for of_rank in of_ranks):
            withdrawn[_refusal(name, adapter.lora_name, of_ranks)].append(identity)
    return dict(withdrawn)


def _newest(name: str, of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the newest version of an adapter. Raises ReshardError if a rank has another, or none."""
    newest = [of_rank.get(name, {}).get("newest") for of_rank in of_ranks]
    if len(set(newest)) > 1 or newest[0] is None:
        raise ReshardError(_refusal(name, "", of_ranks))
    return str(newest[0])


def _refusal(name: str, version: str, of_ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the sentence with which a request for a version is refused, or for the newest if that is empty."""
    refusal = next(
        (of_rank[name]["refusal"] for of_rank in of_ranks if of_rank.get(name, {}).get("refusal")), ""
    )
    if refusal:
        return str(refusal)
    newest = {of_rank.get(name, {}).get("newest") for of_rank in of_ranks}
    if len(newest) > 1:
        return (
            f"adapter {name!r} cannot be served, since the ranks of this vLLM hold different versions: "
            "refit it first"
        )
    return f"this vLLM does not hold {version!r} (any more), but {newest.pop()!r}: ask for adapter {name!r} again"


def _check_id(asked: Any, adapters: Mapping[str, Any]) -> None:
    """Raise ReshardError for another adapter that has an id by which a refitted one is asked for."""
    for name, adapter in adapters.items():
        if asked.lora_int_id == adapter["listed"] or asked.lora_int_id in adapter["held"].values():
            raise ReshardError(
                f"adapter {asked.lora_name!r} has the id of {name!r}, which a trainer refits: give it another id"
            )


def _request_for(name: str, identity: int) -> Any:
    from reshard.engines.vllm.adapters.compat import request_for

    return request_for(name, identity)
