"""What `pip install reshard` brings is enough for the commands on disks, and what it lacks is said in a sentence."""

import json
import re
import shlex
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib

from reshard.core.extras import BASE
from tests.environments import REPOSITORY, UV, attempt, build, clean, environment, run, size_bytes
from tests.on_disk import files_of, use_disk_commands

pytestmark = pytest.mark.install
HEAVY = ("torch", "megatron", "transformers", "vllm", "scipy", "psutil", "safetensors")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist."""
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def base(built, tmp_path_factory):
    """The Python of an environment with the wheel and what it asks for, and nothing else."""
    return environment(tmp_path_factory.mktemp("base") / "venv", [built[0]])


def test_the_commands_on_disks_need_nothing_else_and_write_the_same_bytes(base, checkpoint, tmp_path):
    source = checkpoint("qwen3-moe")
    for python, name in ((base, "bare"), (sys.executable, "full")):
        (tmp_path / name).mkdir()
        use_disk_commands(python, source, tmp_path / name)
    bare, full = (files_of(tmp_path / name) for name in ("bare", "full"))
    # A manifest says with which versions of packages it was made; it is compared without them.
    manifests = [name for name in bare if name.endswith("reshard.json")]
    assert len(manifests) == 2 and len(bare) > 10
    for name in manifests:
        one, two = (json.loads((tmp_path / side / name).read_text()) for side in ("bare", "full"))
        assert one.pop("versions") != two.pop("versions")
        assert one.pop("source").replace("/bare/", "/full/") == two.pop("source") and one == two
        del bare[name], full[name]
    assert bare == full


def test_it_is_small_and_brings_none_of_the_large_packages(base):
    program = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    assert run([base, "-c", program]).strip() == "[]"
    assert size_bytes(base.parent.parent) < 120e6


def test_rollouts_are_watched_without_torch(base):
    program = "from reshard.parity.monitor import check_rollout; v = check_rollout([[-1.0, -2.0]], [[-1.01, -2.0]]); "
    assert run([base, "-c", program + "print(v.ok, v.metrics.tokens)"]).split() == ["True", "2"]


@pytest.mark.parametrize(
    "arguments", [["demo"], ["parity", "A", "B"], ["parity", "A", "vllm:B"]], ids=" ".join
)
def test_a_command_names_the_extra_that_it_lacks(base, arguments, checkpoint):
    there = [
        arg.replace("A", str(checkpoint("qwen3"))).replace("B", str(checkpoint("qwen3"))) for arg in arguments
    ]
    done = attempt([base, "-m", "reshard", *there])
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"Error: this needs torch, which is not installed here: pip install 'reshard\[parity\]'\n",
        done.stderr,
    )
    if arguments != ["demo"]:
        found = json.loads(attempt([base, "-m", "reshard", *there, "--json"]).stdout)
        assert found["exit_code"] == 1 and "reshard[parity]" in found["error"]


@pytest.mark.parametrize(("statement", "extra"), [
    ("from reshard.refit import connect", "megatron"), ("import reshard.trainers.megatron", "megatron"),
    ("import reshard.megatron.build", "megatron"), ("import reshard.engines.vllm.live", "vllm"),
    ("import reshard.engines.vllm.worker", "vllm"), ("from reshard.parity import parity; parity('A', 'B')", "parity"),
    ("from reshard.parity import LiveVllm", "parity"),
])  # fmt: skip
def test_a_call_names_the_extra_that_it_lacks(base, statement, extra):
    program = (
        f"import reshard\ntry:\n    {statement}\nexcept reshard.ReshardError as error:\n    print(error)"
    )
    said = run([base, "-c", program])
    assert re.fullmatch(
        rf"this needs [\w-]+, which is not installed here: pip install 'reshard\[{extra}\]'\n", said
    )


def test_several_processes_without_torch_are_refused_in_a_sentence(base, checkpoint, tmp_path):
    done = attempt([base, "-m", "reshard", "hf-to-mcore", checkpoint("qwen3"), tmp_path / "out"])
    assert done.returncode == 0, "the control: one process needs none"
    alone = clean() | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = attempt([base, "-m", "reshard", "hf-to-mcore", checkpoint("qwen3"), tmp_path / "two"], env=alone)
    assert done.returncode == 1 and "this needs torch" in done.stderr and "reshard[megatron]" in done.stderr


def test_what_every_installation_brings_is_what_is_named_where_it_is_missing():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert list(BASE.values()) == project["dependencies"]


CALLS = {
    "inspect": "import reshard; reshard.inspect(source)",
    "hf_to_mcore": "import reshard; reshard.hf_to_mcore(source, source)",
    "a module": "import reshard.storage.convert",
    "load": "import reshard.megatron.live.memory",
    "a dtype": "from reshard.core.dtypes import DTYPES; DTYPES['bfloat16'].numpy()",
    "a hub id": "import reshard.storage.sources.hf_hub as hub; hub.local_directory('someone/something')",
}


@pytest.fixture(scope="module")
def without_deps(built, tmp_path_factory):
    """The Python of an environment with the wheel alone, as ``pip install --no-deps`` leaves it."""
    return environment(tmp_path_factory.mktemp("bare") / "venv", [built[0]], options=["--no-deps"])


def test_an_installation_without_dependencies_names_the_line_that_installs_them(
    without_deps, checkpoint, tmp_path
):
    """Beside a trainer: what is there stays, and what is missing is named, and only that."""
    source, command = checkpoint("qwen3"), [without_deps, "-m", "reshard"]
    assert run([without_deps, "-c", "import reshard; print(sorted(reshard.__all__)[0])"]) == "AutoBridge\n"
    done = attempt([*command, "inspect", source])
    line = re.fullmatch(
        r"Error: this needs click and huggingface_hub and .*: pip install ('.*)\n", done.stderr
    )
    assert done.returncode == 1 and line is not None, done.stderr
    *others, last = shlex.split(line[1])
    assert last == "xxhash>=3.0" and len(others) == 4
    run(
        [
            *UV,
            "pip",
            "install",
            "--python",
            without_deps,
            *[name for name in others if "ml_dtypes" not in name and "hub" not in name],
        ]
    )
    for name in ("inspect", "check", "diff", "hf-to-mcore", "mcore-to-hf", "plan", "memory"):
        paths = [source] * (1 + (name in ("diff", "hf-to-mcore", "mcore-to-hf")))
        options = {"plan": ["--from", "tp=1", "--to", "tp=1", "--model"], "memory": ["--model"]}.get(name, [])
        done = attempt([*command, name, *options, *paths])
        assert (
            re.fullmatch(f"Error: {MISSING}", done.stderr) or done.returncode == 0 or name == "mcore-to-hf"
        ), done.stderr
    for statement in CALLS.values():
        program = f"source = {str(source)!r}\ntry:\n    {statement}\nexcept __import__('reshard').ReshardError as error: print(error)"
        assert re.fullmatch(MISSING, run([without_deps, "-c", program])), statement
    run([*UV, "pip", "install", "--python", without_deps, *others, last])
    (tmp_path / "out").mkdir()
    use_disk_commands(without_deps, checkpoint("qwen3-moe"), tmp_path / "out")


MISSING = (
    "this needs huggingface_hub and ml_dtypes and xxhash, which are not installed here: "
    "pip install 'huggingface-hub>=0.25' 'ml_dtypes>=0.4' 'xxhash>=3.0'\n"
)


@pytest.mark.parametrize("missing", ["ml_dtypes", "xxhash"])
def test_a_vllm_beside_which_something_is_missing_says_what_and_its_extension_for_refits_is_there(missing):
    """The real vLLM's plugin, in a process that cannot import the package."""
    program = f"""import logging, sys
sys.modules[{missing!r}] = None
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
from reshard.engines.vllm.plugin import register
register()
from reshard.engines.vllm.worker import RefitExtension
try:
    from reshard.engines.vllm.loader import ReshardModelLoader
except __import__("reshard").ReshardError as error:
    print("loader:", error)
print(RefitExtension.__name__)"""
    said = run([sys.executable, "-c", program])
    needs = f"this needs {missing}, which is not installed here: pip install '{BASE[missing]}'"
    assert f"no --load-format reshard: {needs}" in said and f"loader: {needs}\nRefitExtension\n" in said


@pytest.mark.parametrize("inside", [".", "tests", "examples"])
def test_what_is_installed_is_what_is_imported_inside_a_checkout(base, inside):
    """An ordinary installation, not an editable one."""
    program = "import reshard, reshard.cli, reshard.mappings; print(reshard.__file__, reshard.cli.__file__, reshard.mappings.__file__)"
    paths = run([base, "-c", program], cwd=REPOSITORY / inside).split()
    assert len(paths) == 3 and all(Path(path).is_relative_to(base.parent.parent) for path in paths)
    assert run([base, "-m", "reshard", "--version"], cwd=REPOSITORY / inside).startswith(
        "python -m reshard, version "
    )


def test_the_sdist_is_the_checkout(built):
    """So that what it unpacks to can be installed and tested like a clone."""
    with tarfile.open(built[1]) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    listed = run(["git", "-C", REPOSITORY, "ls-files"]).splitlines()
    tracked = {name for name in listed if (REPOSITORY / name).is_file()}
    assert tracked - held <= {".ci/run", ".gitignore"} and len(tracked) > 150


def test_the_wheel_is_typed_and_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as archive:
        names = archive.namelist()
    assert (
        "reshard/py.typed" in names
        and "reshard/cli/main.py" in names
        and "reshard/mappings/llama.py" in names
    )
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"reshard"}
