"""What is needed of vLLM beyond its interface: asked for late, put back, and named with the version
where it is not there."""

import os
import subprocess
import sys
from types import SimpleNamespace as EngineConfig

import pytest
import torch

from reshard import ReshardError
from reshard.engines.sglang import guard as sglang_guard
from reshard.engines.vllm import compat
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.worker import RefitExtension
from reshard.megatron import compat as megatron
from tests.starting.ranks import caught as said_by
from tests.starting.warm import python_of_engine


def test_what_a_vllm_lacks_is_named_with_its_version_and_the_tested_ones():
    from importlib import metadata

    with pytest.raises(ReshardError) as caught, compat.known("keeps its things elsewhere"):
        object().nothing  # noqa: B018
    version = metadata.version("vllm")
    assert (
        str(caught.value)
        == f"this vLLM {version} keeps its things elsewhere; refits are tested with vLLM 0.24 to 0.33: use one of those"
    )
    with pytest.raises(ReshardError, match="this vLLM"), compat.known("keeps its things elsewhere"):
        import vllm.nothing_of_this_name  # noqa: F401
    with pytest.raises(ValueError, match="else"), compat.known("the control: other errors stay as they are"):
        raise ValueError("something else")


def test_variables_that_choose_kernels_are_known_by_the_values_that_vllm_takes(monkeypatch):
    before = compat.set_for_kernels()
    assert (before["VLLM_MARLIN_INPUT_DTYPE"], before["VLLM_USE_DEEP_GEMM"]) == ("None", "True")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")  # as it is without it
    monkeypatch.setenv("VLLM_FLASHINFER_ALLREDUCE_BACKEND", "trtllm")  # no form of weights
    assert compat.set_for_kernels() == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    changed = {"VLLM_MARLIN_INPUT_DTYPE": "'fp8'", "VLLM_USE_DEEP_GEMM": "False"}
    assert compat.set_for_kernels() == before | changed


def test_what_a_megatron_lacks_is_named_with_its_version_and_the_tested_ones():
    outcome = str(megatron.unknown("keeps its things elsewhere"))
    assert outcome.startswith("this megatron-core 0.") and outcome.endswith(
        "reshard is tested with 0.16 to 0.20: use one of those"
    )


def test_the_extension_prepares_its_worker_and_no_other_before_it_is_made():
    """As vLLM does it: the class of its worker gets one more base, and then an instance is made.
    From when it has loaded its model on, dummy weights are not served."""
    seen, model = [], torch.nn.Linear(2, 2)
    config = EngineConfig(
        load_config=EngineConfig(load_format="dummy"), model_config=EngineConfig(enable_sleep_mode=False)
    )

    class Base:
        pass

    class Worker(Base):
        vllm_config, model_runner = config, None

        def get_model(self):
            return model

        def __init__(self, name):
            self.name = name
            seen.append("load_model" in vars(self))

        def load_model(self, part):
            return f"{self.name} loads {part}"

    before = Worker("plain")
    Worker.__bases__ += (RefitExtension,)
    worker = Worker("mixed")
    assert seen == [False, True] and "load_model" not in vars(before)
    model(torch.zeros(2))
    assert worker.load_model(part="all") == "mixed loads all" == Worker.load_model(worker, "all")
    assert "dummy weights" in said_by(lambda: model(torch.zeros(2)))


WRONG = {
    "host": (("nowhere", 1, 2), {}, "nowhere is not an address"),
    "rank": (("127.0.0.1:29600", 3, 2), {}, "rank"),
    "backend": (("127.0.0.1:29600", 1, 2, "pigeons"), {}, "pigeons"),
    "bucket_bytes": (("127.0.0.1:29600", 1, 2, "auto", 0), {}, "bucket_bytes"),
    "timeout": (("127.0.0.1:29600", 1, 2), {"timeout": -1}, "timeout"),
    "match_vllm_rounding": (("127.0.0.1:29600", 1, 2), {"match_vllm_rounding": "yes"}, "match_vllm_rounding"),
}


@pytest.mark.parametrize(("arguments", "options", "named"), WRONG.values(), ids=WRONG)
def test_a_worker_refuses_wrong_arguments_before_it_gives_up_its_connection(arguments, options, named):
    worker = RefitExtension()
    worker._reshard_link = link = object()
    said = said_by(lambda: worker.reshard_connect_worker(*arguments, **options))
    assert named in said and worker._reshard_link is link, said


def test_importing_reshard_changes_nothing_in_vllm_or_megatron():
    program = """
import sys
from vllm import _custom_ops
from megatron.core.tensor_parallel import random
from megatron.core.transformer import multi_latent_attention as mla
def state():
    return {(m.__name__, n): id(v) for m in (_custom_ops, random, mla) for n, v in vars(m).items()
            if not n.startswith("__")}
before = state()
import reshard.engines.vllm.worker, reshard.engines.vllm.live, reshard.megatron.compat
import reshard.megatron.build, reshard.parity.systems.vllm
assert state() == before, [name for name, value in state().items() if before.get(name) != value]
print("nothing")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1:] == ["nothing"], done.stderr[-2000:]


def test_warming_up_runs_before_there_are_weights_and_requests_do_not():
    """vLLM's second model runner, which needs Triton and with it a GPU, profiles and warms up
    through what also serves."""
    from inspect import signature

    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    assert "dummy_run" in signature(GPUModelRunner.execute_model).parameters
    assert hasattr(Worker, "compile_or_warm_up_model")

    class Runner:
        def execute_model(self, tokens, dummy_run=False):
            return tokens

    class PlainWorker:
        def __init__(self):
            self.model_runner = Runner()

        def compile_or_warm_up_model(self, fails=False):
            if fails:
                raise RuntimeError("out of memory")
            return self.model_runner.execute_model(2)

    worker, module = PlainWorker(), torch.nn.Linear(1, 1)
    config = EngineConfig(load_config=EngineConfig(load_format="dummy"))
    guard_of(module, config).watch(module, worker)
    assert worker.model_runner.execute_model(1, dummy_run=True) == 1
    assert worker.compile_or_warm_up_model() == 2
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.compile_or_warm_up_model(fails=True)
    with pytest.raises(ReshardError, match="refit it before it serves"):
        worker.model_runner.execute_model(3)
    guard_of(module, config).ready = True
    assert worker.model_runner.execute_model(3) == 3


def test_weights_that_vllm_gives_back_or_sets_to_zero_are_not_served_until_a_refit():
    class PlainWorker:
        def __init__(self):
            self.model_runner = EngineConfig(execute_model=lambda tokens: tokens)

        def discard(self, tags):
            pass

        def reset_weights(self):
            pass

    worker, module = PlainWorker(), torch.nn.Linear(1, 1)
    guard = guard_of(
        module,
        EngineConfig(
            load_config=EngineConfig(load_format="auto"), model_config=EngineConfig(enable_sleep_mode=False)
        ),
    )
    guard.watch(module, worker)
    guard.version = 3
    worker.discard(("kv_cache",))
    assert worker.model_runner.execute_model(1) == 1 and guard.version == 3 and not guard.asleep
    worker.reset_weights()
    outcome = said_by(lambda: worker.model_runner.execute_model(1))
    assert "this vLLM holds zeros since its weights were reset: refit it" in outcome and guard.version is None
    guard.ready, guard.version = True, 4
    worker.discard(("weights", "kv_cache"))
    assert "no weights since it discarded them" in said_by(lambda: worker.model_runner.execute_model(1))
    assert guard.asleep and guard.version is None


@pytest.mark.parametrize("success", [True, False])
def test_weights_that_sglang_loads_from_a_disk_are_of_no_version_also_where_that_fails(success):
    """It then loads what it was started with."""
    model = torch.nn.Linear(1, 1)
    updater = EngineConfig(tp_worker=EngineConfig(model_runner=EngineConfig(model=model)))
    guard = sglang_guard.guard_of(model, "auto")
    guard.version = 3
    sglang_guard.follow_load(lambda _: EngineConfig(success=success), updater)
    assert guard.version is None and guard.writes and guard.ready


@pytest.mark.parametrize("theirs", [True, False])
def test_weights_that_vllm_takes_from_others_are_of_no_version_and_counted(theirs):
    class PlainWorker:
        def __init__(self):
            self.model_runner = EngineConfig(execute_model=lambda tokens: tokens)
            self.weight_transfer_engine = EngineConfig(**{} if theirs else {"attach_reshard_worker": print})

        def update_weights(self, update_info):
            if "names" not in update_info:
                raise RuntimeError("half of them were written")

        def reload_weights(self, weights_iterator=None):
            if not weights_iterator:
                raise RuntimeError("half of them were loaded")

    worker, module = PlainWorker(), torch.nn.Linear(1, 1)
    guard = guard_of(
        module,
        EngineConfig(
            load_config=EngineConfig(load_format="auto"), model_config=EngineConfig(enable_sleep_mode=False)
        ),
    )
    guard.watch(module, worker)
    guard.version = 3
    worker.update_weights({"names": []})
    assert (guard.version, guard.writes) == ((None, 1) if theirs else (3, 0)) and guard.ready
    guard.version = 4
    worker.reload_weights(weights_iterator=[("weight", torch.ones(1))])
    assert guard.version is None and guard.writes == 1 + theirs and guard.ready
    for fails in (worker.reload_weights, *[lambda: worker.update_weights({})] * theirs):
        guard.version, before = 5, guard.writes
        with pytest.raises(RuntimeError, match="half of them"):
            fails()
        assert guard.version is None and guard.writes > before


def test_operators_that_a_batch_invariant_vllm_replaces_are_given_back():
    """Else what this process runs after the engine, such as the same model in fp32, has vLLM's kernels."""
    program = """
import torch

from reshard.engines.vllm import compat
from vllm.model_executor.layers import batch_invariant

before, rows = torch.bmm, torch.randn(4, 1024)
expected = rows.log_softmax(-1)
assert compat.is_batch_invariant()
for _ in range(2):
    batch_invariant.enable_batch_invariant_mode()
    assert torch.bmm is not before
    try:
        rows.log_softmax(-1)
    except TypeError:
        print("replaced")  # by a kernel of Triton, which needs a GPU
    compat.end_batch_invariance()
    assert torch.bmm is before and torch.equal(rows.log_softmax(-1), expected)
"""
    environment = os.environ | {"VLLM_BATCH_INVARIANT": "1"}
    done = subprocess.run(
        [python_of_engine(), "-c", program], capture_output=True, text=True, timeout=600, env=environment
    )
    assert done.stdout.splitlines()[-2:] == ["replaced", "replaced"], done.stderr[-2000:]
