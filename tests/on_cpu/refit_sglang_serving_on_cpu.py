"""A real SGLang that serves on the CPU, in processes of its own, and is refitted from a real Megatron
model through its plugin and ``Engine.collective_rpc``.

Without its kernels SGLang runs dense models by torch alone.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from urllib.request import Request, urlopen

import torch

from reshard import digest
from reshard.comm.http import call_route
from reshard.core.limits import PENDING_BYTES
from reshard.delta import save
from reshard.engines.sglang.calls import (
    call,
    call_and_join,
    close_server,
    connect_server,
    refit_request,
    refit_server,
)
from reshard.engines.sglang.delta_calls import apply_deltas, read_deltas, roll_back
from reshard.engines.workers.actions import WRITE
from reshard.integrations import Fleet, SglangClient
from reshard.parity import parity
from reshard.refit import RefitGroup, connect
from reshard.trainers.megatron import MegatronModel
from tests import install_sglang_cpu
from tests.on_cpu.sglang_on_cpu import only_our_models
from tests.starting.ranks import caught, free_port
from tests.tools.refit_sides import Steps, trainer

ASKED = {
    "sampling_params": {"max_new_tokens": 4, "temperature": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}
PROMPTS = [[(7 * i + 3 * j) % 1000 for j in range(n)] for i, n in enumerate((9, 33, 21))]


def engine(directory: str, log_level: str = "error", **options):
    """SGLang on the CPU; its scheduler is another process."""
    import sglang

    only_our_models()
    return sglang.Engine(
        model_path=directory,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        max_total_tokens=1024,
        context_length=256,
        log_level=log_level,
        **options,
    )


@contextmanager
def logging_to(path: str):
    """Have processes that are started inside write their logs to a file."""
    kept = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def answers(served) -> list:
    """Prompt logprobs and four greedy tokens of every prompt."""
    return answered(served.generate(input_ids=PROMPTS, **ASKED))


def answered(outputs: list[dict]) -> list:
    """The same of SGLang's outputs."""
    return [
        [[one[0] for one in output["meta_info"]["input_token_logprobs"][1:]], list(output["output_ids"])]
        for output in outputs
    ]


def settle(served) -> None:
    """Wait until SGLang has no trace of requests that it has answered: what it then would be asked to do
    with its memory or weights would end it."""
    while not served.flush_cache().success:
        time.sleep(0.1)


def said_by(action) -> str:
    """The sentence of any error that an action raises."""
    try:
        action()
    except Exception as error:
        return str(getattr(error, "detail", "") or error)
    return "no error"


def serve(rank: int, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]):
    """Rank 0 is the trainer; rank 1 drives the engine, whose scheduler is member 1."""
    steps = Steps(sides, rank, 2)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{sides['folder']}/side{rank}", rank=0, world_size=1
    )
    return train(steps, sides, flags, checkpoints) if rank == 0 else drive(steps, sides, checkpoints)


def train(steps: Steps, sides: dict, flags: list[str], checkpoints: list[tuple[str, str]]) -> list[str]:
    """Refit from each checkpoint, then while the engine has a request and while it sleeps, and once
    more."""
    chunks, load = trainer(flags, checkpoints[0][1], wide=True)
    steps.meet("started")
    members = RefitGroup.join(f"127.0.0.1:{sides['port']}", 0, 2, 60, sides["secret"])
    link = connect(members, MegatronModel(chunks))
    said = []
    for step, (_, mcore) in enumerate(checkpoints):
        if step:
            load(mcore)
        steps.meet(f"before {step}")
        link.refit(step, verify=True)
    for state in ("busy", "asleep"):
        steps.meet(state)
        said.append(caught(link.refit))
    steps.meet("awake")
    link.refit(9)
    link.close()
    steps.meet("server")
    link = connect(RefitGroup.join(f"127.0.0.1:{sides['again']}", 0, 3, timeout=60), MegatronModel(chunks))
    steps.meet("connected")
    link.refit(5, verify=True)
    steps.meet("by http")
    link.close()
    load(checkpoints[0][1])
    fleet = Fleet(MegatronModel(chunks), "127.0.0.1")
    fleet.add(SglangClient(f"http://127.0.0.1:{sides['http']}", name="pod-3"))
    reports = [fleet.send(6, pausing=True), fleet.send(7, verify=True, pausing=True, required=["pod-3"])]
    fleet.close()
    again = Fleet(MegatronModel(chunks), "127.0.0.1")
    client = SglangClient(f"http://127.0.0.1:{sides['http']}", name="pod-3")
    again.add(client)
    deadline = time.monotonic() + 30
    while again.describe()["found"] is None and time.monotonic() < deadline:
        time.sleep(0.2)
    held = client.holds()
    said.append([again.describe()["found"], again.describe()["engines"], held == (7, fleet.origin)])
    again.close()
    said.append([(report.version, [*report.reports], report.behind) for report in reports])
    steps.meet("end")
    return said


def drive(steps: Steps, sides: dict, checkpoints: list[tuple[str, str]]) -> dict:
    """What an engine that starts with dummy weights answers in each state, and what one answers that has
    loaded each checkpoint."""
    shared = set(Path("/dev/shm").glob("sglang_*"))
    results: dict = {"served": [], "digests": []}
    log = f"{sides['folder']}/log"
    with logging_to(log):
        dummy = engine(checkpoints[0][0], log_level="info", load_format="dummy")
    results["before"] = answers(dummy)
    steps.meet("started")
    address = f"127.0.0.1:{sides['port']}"
    results["unconnected"] = said_by(lambda: call(dummy, "reshard_refit", version=0))
    call(
        dummy, "reshard_connect", address=address, first_rank=1, size=2, timeout=60.0, secret=sides["secret"]
    )
    results["unfit"] = said_by(lambda: answers(dummy))
    results["unfit digest"] = said_by(lambda: digest(dummy))
    for step in range(len(checkpoints)):
        steps.meet(f"before {step}")
        call(dummy, "reshard_refit", version=step, verify=True)
        results["served"].append(answers(dummy))
        results["digests"].append(digest(dummy).text)
    results["version"] = said_by(lambda: call(dummy, "reshard_check_version", version=1))
    results["other version"] = said_by(lambda: call(dummy, "reshard_check_version", version=7))
    chain = f"{sides['folder']}/chain"  # to the last checkpoint, and back
    for old, new in ((0, 1), (1, 0)):
        save(checkpoints[old][0], checkpoints[new][0], chain)
    sampling = {"max_new_tokens": 240, "temperature": 0, "ignore_eos": True}
    steps.meet("busy")  # first, since the trainer may be late, and the request be over by then
    stream = dummy.generate(input_ids=PROMPTS[0], sampling_params=sampling, stream=True)
    next(stream)  # the request runs
    results["busy"] = said_by(lambda: call(dummy, "reshard_refit", version=7))
    results["deltas while busy"] = said_by(lambda: apply_deltas(dummy, chain))
    results["goes on"] = [len(part["output_ids"]) for part in stream][-1], answers(dummy)
    settle(dummy)
    dummy.release_memory_occupation(tags=["kv_cache", "weights"])
    steps.meet("asleep")
    results["asleep"] = said_by(lambda: call(dummy, "reshard_refit", version=8))
    dummy.resume_memory_occupation(tags=["kv_cache", "weights"])
    results["woken"] = said_by(lambda: answers(dummy))
    steps.meet("awake")
    call(dummy, "reshard_refit", version=9)
    results["mended"] = answers(dummy)
    results["deltas of an engine"] = follow(dummy, chain)
    results["no such call"] = said_by(lambda: call(dummy, "reshard_refti"))
    for by in (
        dict(enable_dp_attention=True),
        dict(enable_dp_attention=False, attn_dp_size=2),
    ):  # from 0.5.22 on
        apart = SimpleNamespace(server_args=SimpleNamespace(**by))
        results.setdefault("data parallel", []).append(said_by(lambda of=apart: call(of, "reshard_release")))
    dummy.shutdown()
    results["log"] = Path(log).read_text(encoding="utf-8")
    results |= drive_server(steps, sides, checkpoints)
    for left in set(Path("/dev/shm").glob("sglang_*")) - shared:  # by SGLang, when it ends
        left.unlink(missing_ok=True)
    return results


def follow(served, chain: str) -> tuple:
    """What an engine answers at the end of a chain, one of whose versions it holds, when it has gone back to that, and
    at the end again; and what is said of other calls after something else has written a tensor."""
    reached = apply_deltas(served, chain), answers(served)
    settle(served)
    back = said_by(lambda: roll_back(served, 0)), roll_back(served, 1), answers(served)
    settle(served)
    reached = *reached, back, apply_deltas(served, chain), answers(served)
    settle(served)
    has_sessions = hasattr(
        served, "begin_weight_update"
    )  # from 0.5.21 on, and outside of one nothing is written
    if has_sessions:
        served.begin_weight_update()
    served.update_weights_from_tensor([("model.norm.weight", torch.full((64,), 2.0))])
    if has_sessions:
        served.end_weight_update()
    return *reached, said_by(lambda: roll_back(served, 1)), said_by(lambda: apply_deltas(served, chain))


@contextmanager
def server(directory: str, port: int, without_plugin: Path | None = None, stages: int = 2):
    """SGLang's own server of a Megatron checkpoint, with pipeline stages; its address. Or of a Hugging Face
    directory, with one, without the plugin, and with its log in a file."""
    if without_plugin is None:
        options = {"model-path": f"{directory}/hf", "model-loader-extra-config": json.dumps({"megatron": directory}),
                   "pp-size": stages, "log-level": "error"}  # fmt: skip
    else:
        options = {"model-path": directory, "log-level": "info"}
    options |= {"device": "cpu", "dtype": "float32", "attention-backend": "torch_native", "sampling-backend": "pytorch",
               "grammar-backend": "none", "max-total-tokens": 1024, "context-length": 256, "port": port}  # fmt: skip
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = [sys.executable, "-m", "sglang.launch_server", *flags]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 300
    switches = ["--skip-tokenizer-init", "--disable-cuda-graph", "--skip-server-warmup"]
    from sglang.srt.utils import kill_process_tree

    only_our_models()
    # From 0.5.19 on it has to be told where more stages run than the host has nodes of memory.
    where = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if install_sglang_cpu.version() > (0, 5, 18) else {}
    if without_plugin is not None:
        where = where | {"SGLANG_PLUGINS": "none"}
    with (
        open(without_plugin or os.devnull, "wb") as log,
        subprocess.Popen(
            [*program, *switches],
            env=os.environ | where,
            stdout=log if without_plugin else None,
            stderr=log if without_plugin else None,
        ) as process,
    ):
        try:
            while caught(lambda: call_route(url, "model_info")) != "no error":
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            yield url
        finally:
            kill_process_tree(process.pid)


def under_requests(url: str, action, prompt: list[int] = PROMPTS[0]) -> list:
    """What is said of an action while a request runs, after how many seconds, whether the request still ran then, and
    the tokens that it had in the end, each with its logprob."""
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True, "return_logprob": True}
    request = Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as stream, ThreadPoolExecutor(1) as thread:
        stream.readline()  # it runs
        began, ended = time.monotonic(), []

        def act() -> str:
            said = said_by(action)
            ended.append(time.monotonic() - began)
            return said

        acted = thread.submit(act)
        last, ran = b"", False
        for line in stream:
            if line.startswith(b"data: {"):
                last, ran = line, ran or bool(ended)  # tokens came after it
        said = acted.result()
        about = json.loads(last.removeprefix(b"data: "))["meta_info"]
        return [said, ended[0], ran, [(one[1], one[0]) for one in about["output_token_logprobs"]]]


def applied_after_an_answer(url: str, chain: str) -> str:
    """What a server says of deltas that come right after a request's last token, when its stages may still hold it:
    by the route alone, since to ask for the plugin before takes their loop's next turn."""
    read_deltas(url, "of this call", chain, 2, False, None, 60, PENDING_BYTES)
    body = refit_request(2, False)
    body["load_format"] = json.dumps({"action": WRITE, "session": "of this call"})
    call_route(
        url, "generate", {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    )
    return said_by(lambda: call_and_join(partial(call_route, url, "update_weights_from_distributed"), body))


def drive_server(steps: Steps, sides: dict, checkpoints: list[tuple[str, str]]) -> dict:
    """What a server answers, and parity says of it, that has loaded the first checkpoint from Megatron's, that has been
    refitted by HTTP from the last, and that has loaded that."""
    log = Path(f"{sides['folder']}/log of none")
    with (
        server(checkpoints[0][1], sides["http"]) as url,
        server(checkpoints[0][0], free_port(), without_plugin=log) as other,
    ):
        served = f"sglang:{url}"

        def told() -> list:
            outputs = call_route(url, "generate", {"input_ids": PROMPTS, **ASKED})
            results["versions"].append({output["meta_info"]["weight_version"] for output in outputs})
            return answered(outputs)

        results: dict = {"versions": []}
        results["server digests"] = [digest(url).text]
        results |= {"loaded": [told()], "parity": [parity(served, checkpoints[1][0], PROMPTS).ok]}
        chain = f"{sides['folder']}/chain"
        results["read under requests"] = under_requests(
            url, lambda: read_deltas(url, "of one call", chain, 1, False, None, 60, PENDING_BYTES)
        )
        results["deltas under requests"] = under_requests(url, lambda: apply_deltas(url, chain, 1))
        results["deltas"] = [
            (
                apply_deltas(url, chain, version, verify=True),
                told(),
                call_route(url, "model_info")["weight_version"],
            )
            for version in (1, None)
        ]
        results["back"] = (
            roll_back(url, 1),
            told(),
            call_route(url, "model_info")["weight_version"],
            said_by(lambda: roll_back(url, 1)),
            apply_deltas(url, chain, verify=True),
            told(),
        )
        results["at once"] = [applied_after_an_answer(url, chain) for _ in range(10)]
        results["no chain"] = said_by(lambda: apply_deltas(url, f"{chain}-not"))
        results["no group"] = said_by(lambda: refit_server(url, 5))
        results["nothing to join"] = said_by(
            lambda: call_route(
                url,
                "init_weights_update_group",
                {
                    "group_name": "reshard",
                    "backend": "join",
                    "master_address": "",
                    "master_port": 0,
                    "rank_offset": 0,
                    "world_size": 0,
                },
            )
        )
        began = time.monotonic()
        results["no plugin"] = [
            said_by(lambda: connect_server(other, f"127.0.0.1:{free_port()}", 1, 3, secret="x" * 32)),
            said_by(lambda: apply_deltas(other, chain)),
            said_by(lambda: digest(other)),
            time.monotonic() - began,
            answered(call_route(other, "generate", {"input_ids": PROMPTS, **ASKED})),
            log.read_text(encoding="utf-8"),
        ]
        results["options"] = said_by(lambda: connect_server(url, "127.0.0.1:1", 1, 2, bucket_bytes=-1))
        steps.meet("server")
        connect_server(url, f"127.0.0.1:{sides['again']}", 1, 3)
        results["under requests"] = under_requests(url, lambda: refit_server(url, 5))
        steps.meet("connected")
        refit_server(url, 5, verify=True)
        results["server digests"].append(digest(url).text)
        results["by http"] = told(), call_route(url, "model_info")["weight_version"]
        steps.meet("by http")
        steps.meet("end")
        results["by a fleet"] = told(), digest(url).text
        close_server(url)
        call_route(url, "update_weights_from_disk", {"model_path": checkpoints[1][0]})
        results["loaded"].append(told())
        results["parity"].append(parity(checkpoints[1][0], served, PROMPTS).ok)
    return results
