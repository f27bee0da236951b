"""Refits on the CPU from larger models under Megatron, whose towers are those of trainers
(`tests.tools.larger_models`), into the real model classes of vLLM or, in its environment, of SGLang."""

import gc
from functools import partial

from reshard.megatron import towers
from reshard.refit import connect
from reshard.trainers.megatron import MegatronModel
from tests.on_cpu import megatron_on_cpu
from tests.on_cpu.refit_without_table_on_cpu import engine_of
from tests.tools.larger_models import LargerTrainer
from tests.tools.refit_sides import distributed, fingerprint, start


def refits(
    rank: int,
    sides: dict,
    flags: list[str],
    wheels: dict[str, str],
    kinds: list[str],
    pairs: list[tuple[str, str]],
    options: dict,
):
    """For each kind: what an engine of the first checkpoint holds after a refit from a trainer of the second, what
    its own loader makes of either, what it says it left alone, and what it holds where each head's queries, keys and
    values are taken for published ones."""
    is_trainer, is_engine, members = start(rank, sides)
    build, engine_class = engine_of()
    built = megatron_on_cpu.build(flags) if is_trainer else None
    if built is not None:
        for model in built[0]:
            model.bfloat16()
    results = {}
    for kind in kinds:
        trainer = LargerTrainer(wheels, kind, *built, pairs[1][0]) if built is not None else None
        if trainer is not None:
            trainer.take(*pairs[1])
            if kind == "mcore-bridge":  # whose tower is not trained, and lies outside of the buffer
                for chunk in trainer.chunks:
                    for name, parameter in chunk.named_parameters():
                        parameter.requires_grad_(not name.startswith("visual."))
                trainer.chunks = [distributed(chunk) for chunk in trainer.chunks]

        def destination():
            return engine_class(*build(pairs[0][0], load_format="dummy", **options))

        def refitted(trainer=trainer, destination=destination):
            source = partial(MegatronModel, trainer.chunks) if trainer is not None else None
            link = connect(members, source, destination if is_engine else None)
            link.refit(verify=True)
            if not is_engine:
                return None
            engine = link.receiver.engine
            left = [entry["how"] for entry in engine.tensor_accounts() if entry["what"] == "left alone"]
            return fingerprint(engine.module), left

        held, plain = refitted(), towers._by_head
        if kind == "layers":
            towers._by_head = lambda name, shape, heads: iter(
                [towers.Part(name, towers.whole(shape), (0,) * len(shape))]
            )
        control = refitted() if kind == "layers" else None
        towers._by_head = plain
        if is_engine:
            expected = [fingerprint(build(hf, **options)[0]) for hf, _ in pairs]
            results[kind] = (*held, expected, control[0] if control else None)
        gc.collect()
    return results
