"""What a link says of itself, for logs."""

from typing import Any

from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.copying.addresses import region_addresses
from reshard.refit.copying.tables import CODEC, bytes_of
from reshard.refit.receiver import Receiver
from reshard.refit.sender import Sender


def described(link: Any) -> dict[str, Any]:
    """Return what `reshard.refit.link.Link.describe` says."""
    receiver: Receiver | None = link.receiver
    agreed, chain = link.agreed, link.chain
    of_below = {"weights": described(link.below.link)} if link.below is not None else {}
    return {
        "backend": agreed.backend,
        "keep_mapped": link.keep_mapped,
        "bucket_bytes": agreed.bucket_bytes,
        **chain.described(),
        "routes": _routes(receiver) if receiver is not None else [],
        "sends": _sends(link.sender) if link.sender is not None else [],
        "quantized": receiver.engine.quantized_layers() if receiver is not None else [],
        "parts": receiver.slab.described() if receiver is not None else {},
        "tensors": receiver.engine.tensor_accounts() if receiver is not None else [],
        "digest": link.digest.now(),
    } | of_below


def _sends(sender: Sender) -> list[dict[str, Any]]:
    names, routes = sender.group.names, sender.routes()
    return [
        {"to": [names[other] for other in line.ranks], "route": routes[rank], "pieces": len(pieces)}
        for rank, streams in sender.streams(routes).items()
        for line, pieces in streams.items()
        if line.first == rank
    ]


def _routes(receiver: Receiver) -> list[dict[str, Any]]:
    memory, agreed = region_addresses(receiver.engine.regions.values()), receiver.agreed
    routes = []
    for rank, route in receiver.routes().items():
        table = receiver.copies(rank, memory)
        before = {line.before(receiver.group.rank) for line in receiver.streams(rank)}
        cast = {
            str(codec): bytes_of(table[table[:, CODEC] == number])
            for number, codec in enumerate(CODECS)
            if number != PLAIN and (table[:, CODEC] == number).any()
        }
        routes.append(
            {
                "from": receiver.group.names[rank],
                "route": route,
                "through": [receiver.group.names[other] for other in sorted(before - {rank})],
                "bytes": bytes_of(table),
                "cast": cast,
                "apart": agreed.why_apart(rank, receiver.group.rank),
            }
        )
    return routes
