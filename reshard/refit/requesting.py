"""Requests: trainers' ranks tell what they hold, and inference ranks which pieces they want."""

from reshard.comm.group import RefitGroup
from reshard.models.config_fields import ignore_hint_for
from reshard.models.without_table import any_model
from reshard.refit.agreement import Agreement
from reshard.refit.protocol.encoding import readable
from reshard.refit.protocol.greeting import one_config, post_config
from reshard.refit.receiver import Receiver
from reshard.refit.sender import Sender
from reshard.refit.stages import check_stages


def exchange_requests(
    group: RefitGroup, agreed: Agreement, sender: Sender | None, receiver: Receiver | None
) -> None:
    """Tell engines what trainers hold, and trainers which pieces engines want; every member calls this, at connect, and
    where engines want others later."""
    config = b""
    if receiver is not None:
        receiver.find_moved()
        config = post_config(group, receiver.engine.hf_config)
    where = f"the config of {group.names[agreed.engines[0]]}"
    # What a table refuses may be refused only by a trainer of Megatron, which says how to ignore it.
    with readable(where), ignore_hint_for("refit"):
        model = any_model(one_config(group, agreed.engines, config), where)
    if sender is not None:
        sender.publish(model)
    if receiver is not None:
        receiver.plan(model.where)
        check_stages(group, agreed, receiver.engine, model, receiver.offered)
        receiver.find_moved()  # the engine may bring others by now
    if sender is not None:
        sender.receive_requests()
