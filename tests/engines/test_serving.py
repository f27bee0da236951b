"""``--load-format reshard``: vLLM has of a Megatron checkpoint what it has of the Hugging Face
directory, by its own loader."""

import json
import shutil
import urllib.error

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf
from reshard.delta import apply_deltas, roll_back, save
from tests.starting.ranks import run_on_ranks
from tests.storage.test_wrapped import published
from tests.tools.checkpoints import make
from tests.tools.disk import flip
from tests.tools.vllm_server import post, served, with_tokenizer

# variant, its options, Megatron's layout, vLLM's sizes on four ranks
CASES = [
    ("llama-rope-tied", {}, MegatronLayout(tp=2, pp=2), dict(tp=2, pp=2)),
    ("qwen2", {}, MegatronLayout(tp=4), dict(tp=4)),  # twice the key heads
    ("seed-oss", {}, MegatronLayout(tp=2, pp=2), dict(tp=2, pp=2)),
    ("phi4", {}, MegatronLayout(tp=2, pp=2), dict(tp=4)),  # twice the key heads
    ("qwen3-moe", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), dict(tp=4, enable_expert_parallel=True)),
    ("qwen3-moe-mixed", {}, MegatronLayout(ep=4, etp=1), dict(tp=4)),
    ("qwen2-moe-mixed", {}, MegatronLayout(tp=2, ep=2, etp=1), dict(tp=4)),
    ("deepseek-v3", dict(dtype=torch.bfloat16, mtp=True), MegatronLayout(tp=2, pp=2, ep=2, etp=1), dict(tp=4)),
    ("glm4-moe", dict(mtp=True, copies=False), MegatronLayout(tp=2), dict(tp=2, pp=2)),
    ("ling", {}, MegatronLayout(tp=2, ep=2, etp=1), dict(tp=2, pp=2)),
    ("minimax-m2", {}, MegatronLayout(tp=2, ep=2, etp=1), dict(tp=4)),
    ("glm-moe-dsa-shared", dict(dtype=torch.bfloat16), MegatronLayout(tp=2, ep=2, etp=1), dict(tp=4)),
    ("olmoe", {}, MegatronLayout(tp=2, ep=4, etp=1), dict(tp=4)),
    ("ernie", {}, MegatronLayout(pp=2, ep=2, etp=1), dict(tp=2)),
    ("gpt-oss", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), dict(tp=2, pp=2)),
    ("gpt-oss", {}, MegatronLayout(ep=4, etp=1), dict(tp=2, pp=2, enable_expert_parallel=True)),
    ("qwen3-next", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), dict(tp=2, pp=2)),
    ("qwen3.5", {"wrapped": True}, MegatronLayout(tp=4), dict(tp=4)),
    ("qwen3.5-moe", {"wrapped": True}, MegatronLayout(pp=2, ep=4, etp=1), dict(tp=2, pp=2)),
]  # fmt: skip
RESHARD = dict(load_format="reshard")
VERIFIED = RESHARD | dict(model_loader_extra_config={"verify": True})
WHOLE = RESHARD | dict(model_loader_extra_config={"whole_tensors": True})


@pytest.fixture(scope="module")
def held(checkpoint, tmp_path_factory):
    """What each of four ranks holds, by case and source."""
    cases = []
    for variant, options, layout, sizes in CASES:
        folder = tmp_path_factory.mktemp(variant)
        if options.get("wrapped"):
            source, other = (
                published(folder / f"hf{n}", variant == "qwen3.5-moe", seed=n, mtp=False) for n in (0, 1)
            )
        else:
            source, other = checkpoint(variant, **options), checkpoint(variant, seed=1, **options)
        hf_to_mcore(source, folder / "mcore", layout)
        hf_to_mcore(other, folder / "other", layout)
        cases.append(
            (sizes, {"vllm": (source, {}), "boxes": (folder / "mcore", RESHARD), "whole": (folder / "mcore", WHOLE),
                     "huggingface": (source, RESHARD), "other": (folder / "other", RESHARD)})
        )  # fmt: skip
        if variant == "qwen3-moe-mixed":
            hf_to_mcore(source, folder / "hybrid", layout, model_class="hybrid")
            cases[-1][1]["hybrid"] = (folder / "hybrid", RESHARD)
    return run_on_ranks(4, "loaded", cases, module="serving_on_cpu")


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0] for case in CASES])
def test_every_rank_holds_what_vllms_own_loader_gives_it(case, held):
    for rank in held:
        results = rank[case]
        for name in results.keys() - {"vllm", "other"}:
            assert results[name][0] == results["vllm"][0], f"bit for bit, {name}"
        assert (
            results["other"][0] != results["vllm"][0]
            and results["other"][0].keys() == results["vllm"][0].keys()
        )
        assert results["boxes"][2] == "each rank its own boxes"
        # Experts in one tensor are read whole, and vLLM takes them apart.
        packed = CASES[case][0] in ("qwen3.5-moe", "gpt-oss")
        assert results["huggingface"][2].startswith(
            "whole tensors (" if packed else "each rank its own boxes"
        )
        assert results["whole"][2] == "whole tensors (model_loader_extra_config asks for it)"
        assert results["boxes"][3].endswith("/mcore/release")
    boxes, whole = ([rank[case][name][1] for rank in held] for name in ("boxes", "whole"))
    assert max(boxes) < 0.75 * min(whole), "a rank reads little more than it holds"


def test_a_config_that_wants_fp8_gets_the_blocks_that_a_conversion_writes(tmp_path):
    """Megatron's weights are as they were before; what vLLM is handed is what ``mcore-to-hf
    --quantize fp8`` writes."""
    make(tmp_path / "hf", "served-blocks", dtype=torch.bfloat16)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", MegatronLayout(tp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "fp8", quantize=True)
    hf_to_mcore(tmp_path / "fp8", tmp_path / "dequantized", MegatronLayout(tp=2))
    mcore_to_hf(tmp_path / "dequantized", tmp_path / "again", quantize=True)
    excepted = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    excepted["modules_to_not_convert"].append("model.layers.1.self_attn.o_proj")
    cases = [
        (tmp_path / "mcore", RESHARD | dict(hf_config_path=str(tmp_path / "fp8"))),
        (tmp_path / "dequantized", RESHARD),
        (tmp_path / "mcore", RESHARD),
        (tmp_path / "mcore", RESHARD | dict(hf_overrides={"quantization_config": excepted})),
    ]
    *results, without = run_on_ranks(1, "streamed", cases, module="serving_on_cpu")[0]
    name = "model.layers.1.self_attn.o_proj.weight"
    assert without[name] == results[2][name] and without.keys() == results[0].keys() - {f"{name}_scale_inv"}
    for streamed, name in zip(results, ("fp8", "again", "hf"), strict=True):
        wanted = {
            key: bits(tensor) for key, tensor in load_file(tmp_path / name / "model.safetensors").items()
        }
        assert streamed == wanted
        assert sum(key.endswith("_scale_inv") for key in wanted) == (0 if name == "hf" else 28)


def test_a_router_that_the_config_does_not_except_is_in_blocks_too(tmp_path):
    """Without ``modules_to_not_convert`` vLLM makes a router of fp8 and its scales: the bf16
    weights alone would be cast into it."""
    make(tmp_path / "hf", "served-moe-blocks", dtype=torch.bfloat16)
    hf_to_mcore(tmp_path / "hf", tmp_path / "mcore", MegatronLayout(ep=2, etp=1))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "fp8", quantize=True)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]
    assert config.pop("modules_to_not_convert") == sorted(["lm_head", "model.embed_tokens", *routers])
    excepted = RESHARD | dict(hf_config_path=str(tmp_path / "fp8"))
    everything = RESHARD | dict(hf_overrides={"quantization_config": config})
    cases = [(tmp_path / "mcore", excepted), (tmp_path / "mcore", everything)]
    plain, quantized = run_on_ranks(1, "routers", str(tmp_path / "hf"), cases, module="serving_on_cpu")[0]
    assert plain == {f"{name}.weight": True for name in routers}
    assert quantized == {
        f"{name}.{part}": True for name in routers for part in ("weight", "weight_scale_inv")
    }


def test_what_cannot_be_served_is_refused_in_one_sentence(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore", MegatronLayout(tp=2))
    (tmp_path / "empty").mkdir()
    shutil.copytree(tmp_path / "mcore", tmp_path / "bare")
    shutil.rmtree(tmp_path / "bare" / "hf")
    shutil.copytree(tmp_path / "mcore", tmp_path / "torn")
    torn = next((tmp_path / "torn" / "release").glob("*.distcp"))
    torn.write_bytes(torn.read_bytes()[:1000])
    shutil.copytree(tmp_path / "mcore", tmp_path / "int4")
    shutil.copytree(tmp_path / "mcore", tmp_path / "flipped")
    file = max((tmp_path / "flipped").rglob("*.distcp"), key=lambda path: path.stat().st_size)
    flip(file, file.stat().st_size // 2)
    config = json.loads((tmp_path / "int4" / "hf" / "config.json").read_text())
    (tmp_path / "int4" / "hf" / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    cases = [
        (
            tmp_path / "bare",
            RESHARD,
            "has no hf/config.json: name the model's directory or hub id with --hf-config-path",
        ),
        (
            tmp_path / "bare",
            RESHARD | dict(hf_config_path=str(checkpoint("qwen3-tied"))),
            "which makes another model of the weights",
        ),
        (
            tmp_path / "bare",
            RESHARD | dict(hf_config_path=str(checkpoint("llama"))),
            ": pass --hf-config-path with the directory of the config.json that it was trained with",
        ),
        (
            tmp_path / "empty",
            RESHARD,
            "is neither a Hugging Face directory (config.json) nor a Megatron torch_dist",
        ),
        (tmp_path / "nowhere", RESHARD, "is neither a directory nor a hub id such as"),
        (tmp_path / "torn", RESHARD, "is truncated: it has 1000 bytes"),
        (
            tmp_path / "mcore",
            RESHARD | dict(model_loader_extra_config={"threads": 3}),
            "knows nothing: it takes whole_tensors and verify",
        ),
        (tmp_path / "int4", RESHARD, "wants weights quantized as 'gptq'"),
        (tmp_path / "flipped", VERIFIED, "does not have the checksum of reshard.json"),
        (tmp_path / "flipped", RESHARD, "no error"),
        (tmp_path / "mcore", VERIFIED, "no error"),
        (checkpoint("qwen3"), VERIFIED, "has no reshard.json with checksums of its tensors"),
    ]
    outcome = run_on_ranks(1, "refused", [case[:2] for case in cases], module="serving_on_cpu")[0]
    for (_, _, sentence), results in zip(cases, outcome, strict=True):
        assert sentence in results and "\n" not in results, results


# What a directory lacks, and the name of one such tensor, by the model.
LACKING = {
    "qwen3-moe": {
        "mlp.experts.": "model.layers.0.mlp.experts.0.gate_proj.weight",
        "layers.0.mlp.experts.1.up_proj": "model.layers.0.mlp.experts.1.up_proj.weight",
        "layers.1.self_attn.o_proj": "model.layers.1.self_attn.o_proj.weight",
        "self_attn.k_norm": "model.layers.1.self_attn.k_norm.weight",
    },
    # Of a module that has both, the other one is there.
    "qwen2": {
        "layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.k_proj.weight",
        "layers.1.self_attn.v_proj.bias": "model.layers.1.self_attn.v_proj.bias",
    },
}


@pytest.mark.parametrize(
    ("variant", "engine"), [("qwen3-moe", {}), ("qwen3-moe", {"quantization": "fp8"}), ("qwen2", {})]
)
def test_a_directory_that_lacks_weights_is_refused_by_name(variant, engine, checkpoint, tmp_path):
    """vLLM's own loader leaves such layers, or parts of what it joins, as they were."""
    whole = checkpoint(variant)
    directories = []
    for lacking in LACKING[variant]:
        directories.append(shutil.copytree(whole, tmp_path / lacking))
        weights = load_file(directories[-1] / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if lacking not in name}
        assert len(kept) < len(weights)
        save_file(kept, directories[-1] / "model.safetensors")
    arguments = whole, directories, RESHARD | engine
    [(whole_again, outcome)] = run_on_ranks(1, "lacking", *arguments, module="serving_on_cpu")
    assert whole_again == ["no error"] * 3
    for name, said in zip(LACKING[variant].values(), outcome, strict=True):
        for sentence in said:
            assert "of the model's tensors: " in sentence and name in sentence, sentence


def test_a_source_that_is_rewritten_while_it_is_loaded_is_named(checkpoint, tmp_path):
    cases, files = [], []
    for name, options in (("boxes", RESHARD), ("whole", WHOLE)):
        directories = [
            shutil.copytree(checkpoint("qwen3"), tmp_path / f"{name}-hf"),
            tmp_path / f"{name}-mcore",
        ]
        hf_to_mcore(*directories, MegatronLayout(tp=2))
        for directory in directories:
            files.append(max(directory.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size))
            cases.append((directory, options, files[-1]))
    refused = run_on_ranks(1, "load_of_what_changes", cases, module="serving_on_cpu")[0]
    for file, outcome in zip(files, refused, strict=True):
        assert f"{file} changed while it was read" in outcome, outcome
    assert (
        run_on_ranks(1, "refused", [case[:2] for case in cases], module="serving_on_cpu")[0]
        == ["no error"] * 4
    )


def test_a_training_run_is_served_over_http_while_it_writes(tmp_path):
    """``vllm serve`` on two ranks, of the last complete iteration, and then of the next, which has
    been written since; the tokens are those of transformers, by the tokenizer of the config."""
    from transformers import AutoModelForCausalLM

    run, prompt = tmp_path / "run", [5, 17, 3, 250, 8]
    expected = []
    for iteration, name in ((7, "hf"), (14, "later")):
        make(tmp_path / name, "served-qwen3-moe", seed=iteration)
        hf_to_mcore(
            tmp_path / name,
            tmp_path / f"{name}-mcore",
            MegatronLayout(pp=2, ep=2, etp=1),
            iteration=iteration,
        )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected.append([f"w{token}" for token in tokens[0, len(prompt) :].tolist()])
    assert expected[0] != expected[1]
    with_tokenizer(tmp_path / "hf")
    shutil.move(tmp_path / "hf-mcore", run)
    shutil.rmtree(run / "hf")
    (run / "reshard.json").unlink()
    (run / "iter_0000014").mkdir()  # being written
    shutil.copy(run / "iter_0000007" / "__0_0.distcp", run / "iter_0000014")
    options = ("--load-format", "reshard", "--hf-config-path", tmp_path / "hf", "-tp", "2",
               "--worker-extension-cls", "reshard.engines.vllm.worker.RefitExtension")  # fmt: skip
    save(tmp_path / "hf", tmp_path / "later", tmp_path / "chain")
    save(tmp_path / "later", tmp_path / "hf", tmp_path / "chain")
    with served(run, *options, log=tmp_path / "log", VLLM_SERVER_DEV_MODE="1") as url:

        def tokens_of() -> list[str]:
            body = {"model": str(run), "prompt": " ".join(f"w{t}" for t in prompt), "max_tokens": 6,
                    "temperature": 0, "ignore_eos": True}  # fmt: skip
            return post(url + "/v1/completions", body)["choices"][0]["text"].split()

        assert tokens_of() == expected[0]
        for version in (1, 2):
            assert apply_deltas(url, tmp_path / "chain", version, verify=True) == version
            assert tokens_of() == expected[version % 2], "by deltas, in place"
        assert roll_back(url) == 1 and tokens_of() == expected[1]
        assert apply_deltas(url, tmp_path / "chain") == 2 and tokens_of() == expected[0]
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(run / "iter_0000014")}}
        shutil.copytree(tmp_path / "later-mcore" / "iter_0000014", run / "iter_0000014", dirs_exist_ok=True)
        post(url + "/collective_rpc", reload)
        post(url + "/reset_prefix_cache", {}, answers=False)
        assert tokens_of() == expected[1]
        (run / "iter_0000021").mkdir()
        for path in (run / "iter_0000021", make(tmp_path / "other", "served-llama")):
            reload["kwargs"]["weights_path"] = str(path)
            with pytest.raises(urllib.error.HTTPError):
                post(url + "/collective_rpc", reload)
        post(url + "/reset_prefix_cache", {}, answers=False)
        assert tokens_of() == expected[1], "what cannot be loaded costs the engine nothing"
    log = (tmp_path / "log").read_text()
    assert f"{run}/iter_0000021 has no .metadata: it is not a torch_dist checkpoint, or not complete" in log
    assert f"{tmp_path}/other is of another model than the engine's: the shape of model.layers.0." in log
    assert log.count("each rank its own boxes") == 2 and f"{run}/iter_0000007" in log


def bits(tensor: torch.Tensor) -> tuple:
    """As ``tests.on_cpu.serving_on_cpu`` has them."""
    return str(tensor.dtype), tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()
