"""Installing reshard: every way gives a complete package, and what an installation lacks is named
in one sentence.

The tests install a fresh clone of the commit that is checked out, not the working tree.
"""

import json
import re
import shlex
import stat
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tomllib

import reshard
from reshard.core.extras import BASE
from tests.install_vllm_cpu import environment_of_engine
from tests.starting.warm import python_of_engine, python_of_ranks
from tests.tools.environments import (
    REPOSITORY,
    UV,
    attempt,
    build,
    clean,
    clone,
    environment,
    run,
    size_bytes,
)
from tests.tools.on_disk import files_of, use_disk_commands

pytestmark = pytest.mark.install
HEAVY = ("torch", "megatron", "transformers", "vllm", "scipy", "psutil", "safetensors")
LINKS = {"reshard/cli": "../cli", "reshard/mappings": "../mappings"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A clone that nothing is installed from."""
    return clone(tmp_path_factory.mktemp("clone") / "reshard")


@pytest.fixture(scope="module")
def built(checkout, tmp_path_factory):
    """The wheel and the sdist of the clone; the wheel is built from the sdist."""
    return build(checkout, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def base(built, tmp_path_factory):
    """The Python of an environment with the wheel and its dependencies, and nothing else."""
    return environment(tmp_path_factory.mktemp("base") / "venv", [built[0]])


def imported_from(python: Path, folder: Path) -> list[Path]:
    """Return the files of reshard, reshard.cli and reshard.mappings that `python` imports in
    `folder`."""
    program = (
        "import reshard, reshard.cli.main as c, reshard.mappings.llama as m; print(reshard.__file__, "
        "c.__file__, m.__file__)"
    )
    assert "version" in run([python, "-m", "reshard", "--version"], cwd=folder)
    return [Path(path) for path in run([python, "-c", program], cwd=folder).split()]


def test_git_holds_cli_and_mappings_as_links(checkout):
    entries = run(["git", "-C", checkout, "ls-files", "--stage", *LINKS]).splitlines()
    assert [(entry.split()[0], entry.split()[-1]) for entry in entries] == [
        ("120000", path) for path in LINKS
    ]
    assert {path: str((checkout / path).readlink()) for path in LINKS} == LINKS


def test_a_clone_runs_uninstalled_with_the_dependencies_alone(checkout, checkpoint, tmp_path_factory):
    python = environment(tmp_path_factory.mktemp("dependencies") / "venv", list(BASE.values()))
    assert attempt([python, "-c", "import reshard"]).returncode == 1, "the control: nothing is installed"
    assert all(path.is_relative_to(checkout) for path in imported_from(python, checkout))
    inspected = run([python, "-m", "reshard", "inspect", checkpoint("qwen3"), "--json"], cwd=checkout)
    assert json.loads(inspected)["parameters"] > 0


@pytest.mark.parametrize("way", ["pip install .", "pip install -e ."])
def test_pip_installs_a_complete_package_from_a_checkout(way, checkpoint, tmp_path):
    """Elsewhere the installed package is imported, and at the clone's root the clone's own, which is
    just as complete."""
    python = environment(tmp_path / "venv", [*BASE.values(), "pip"])
    cloned = clone(tmp_path / "clone")
    options = way.split()[2:]
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", *options], cwd=cloned)
    installed = cloned if "-e" in options else tmp_path / "venv"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert all(path.is_relative_to(installed) for path in imported_from(python, elsewhere))
    assert all(path.is_relative_to(cloned) for path in imported_from(python, cloned))
    command = [python.with_name("reshard"), "inspect", checkpoint("qwen3"), "--json"]
    assert json.loads(run(command, cwd=elsewhere))["parameters"] > 0


@pytest.mark.parametrize("folder", ["/", ".", "tests", "examples"])
def test_a_package_by_way_of_sdist_and_wheel_is_complete(base, checkout, folder):
    """At the clone's root the clone's package shadows the installed one, which is found anywhere else."""
    owner = checkout if folder == "." else base.parent.parent
    assert all(path.is_relative_to(owner) for path in imported_from(base, checkout / folder))


def test_the_sdist_is_the_checkout_with_files_for_links(built, checkout):
    """So that what it unpacks to can be installed and tested like a clone."""
    with tarfile.open(built[1]) as archive:
        members = archive.getmembers()
    packed = {member.name.partition("/")[2] for member in members}
    assert all(member.isfile() or member.isdir() for member in members)
    tracked = {name for name in run(["git", "-C", checkout, "ls-files"]).splitlines() if name not in LINKS}
    assert tracked - packed <= {".ci/run", ".gitignore"} and len(tracked) > 150
    assert {f"{link}/{path.name}" for link in LINKS for path in (checkout / link).glob("*.py")} <= packed


def test_an_index_takes_the_sdist_and_the_wheel(built):
    """The long description renders, and the metadata is valid."""
    run([sys.executable, "-m", "twine", "check", "--strict", *built])


def test_the_citation_has_the_version_of_the_package():
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {reshard.__version__}\n" in citation


def test_the_wheel_is_typed_and_holds_the_package_alone(built):
    with zipfile.ZipFile(built[0]) as archive:
        entries = archive.infolist()
    names = {entry.filename for entry in entries}
    assert {"reshard/py.typed", "reshard/cli/main.py", "reshard/mappings/llama.py"} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"reshard"}
    assert not any(stat.S_ISLNK(entry.external_attr >> 16) for entry in entries)


def test_the_base_installation_runs_the_commands_on_disk_and_writes_the_same_bytes(
    base, checkpoint, tmp_path
):
    source = checkpoint("qwen3-moe")
    for python, name in ((base, "bare"), (python_of_ranks(), "full")):
        (tmp_path / name).mkdir()
        use_disk_commands(python, source, tmp_path / name)
    bare, full = (files_of(tmp_path / name) for name in ("bare", "full"))
    # A manifest names the versions of packages that it was made with; it is compared without them.
    manifests = [name for name in bare if name.endswith("reshard.json")]
    assert len(manifests) == 2 and len(bare) > 10
    for name in manifests:
        one, two = (json.loads((tmp_path / side / name).read_text()) for side in ("bare", "full"))
        assert one.pop("versions") != two.pop("versions")
        assert one.pop("source").replace("/bare/", "/full/") == two.pop("source") and one == two
        del bare[name], full[name]
    assert bare == full


def test_the_base_installation_is_small_and_brings_none_of_the_large_packages(base):
    program = f"import importlib.util as u; print([n for n in {HEAVY} if u.find_spec(n)])"
    assert run([base, "-c", program]).strip() == "[]"
    assert size_bytes(base.parent.parent) < 120e6


def test_rollouts_are_watched_without_torch(base):
    program = "from reshard.parity import check_rollout; v = check_rollout([[-1.0, -2.0]], [[-1.01, -2.0]]); "
    assert run([base, "-c", program + "print(v.ok, v.metrics.tokens)"]).split() == ["True", "2"]


@pytest.mark.parametrize(
    "arguments", [["demo"], ["parity", "A", "B"], ["parity", "A", "vllm:B"]], ids=" ".join
)
def test_a_command_names_the_extra_that_it_lacks(base, arguments, checkpoint):
    source = str(checkpoint("qwen3"))
    command = [base, "-m", "reshard", *(re.sub("[AB]$", source, argument) for argument in arguments)]
    done = attempt(command)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(
        r"Error: this needs torch, which is not installed here: pip install 'reshard\[parity\]'\n",
        done.stderr,
    )
    if arguments != ["demo"]:
        answer = json.loads(attempt([*command, "--json"]).stdout)
        assert answer["exit_code"] == 1 and "reshard[parity]" in answer["error"]


STATEMENTS = {
    "from reshard.refit import connect": "megatron", "import reshard.trainers.megatron": "megatron",
    "import reshard.megatron.build": "megatron", "import reshard.engines.vllm.live": "vllm",
    "import reshard.engines.vllm.worker": "vllm", "from reshard.parity import parity; parity('A', 'B')": "parity",
    "from reshard.parity import LiveVllm": "parity", "from reshard import load": "megatron",
}  # fmt: skip


def error_of(python: Path, statement: str, **names: object) -> str:
    """Run a statement with `python` and return the message of the ReshardError that it raises."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    program = (
        f"{given}try:\n    {statement}\nexcept __import__('reshard').ReshardError as error: print(error)"
    )
    return run([python, "-c", program])


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_call_names_the_extra_that_it_lacks(base, statement):
    expected = (
        rf"this needs [\w-]+, which is not installed here: pip install 'reshard\[{STATEMENTS[statement]}\]'\n"
    )
    assert re.fullmatch(expected, error_of(base, statement))


def test_help_and_completion_leave_out_what_an_extra_brings(base):
    """As a prompt of Python completes, which gets every name that it offers."""
    program = """import pydoc, reshard, rlcompleter
complete = rlcompleter.Completer(globals()).complete
for package in ("reshard", "reshard.delta", "reshard.engines", "reshard.parity", "reshard.refit"):
    pydoc.render_doc(eval(package))
    print(*(offered for n in range(99) if (offered := complete(f"{package}.", n)) and "__" not in offered))
"""
    package, delta, engines, *_ = run([base, "-c", program]).split("\n")
    assert {"reshard.hf_to_mcore(", "reshard.parity"} <= set(
        package.split()
    ) and "reshard.load" not in package
    assert "reshard.delta.show(" in delta and "reshard.delta.save" not in delta and engines == ""


def test_several_processes_without_torch_are_refused_in_a_sentence(base, checkpoint, tmp_path):
    done = attempt([base, "-m", "reshard", "hf-to-mcore", checkpoint("qwen3"), tmp_path / "out"])
    assert done.returncode == 0, "the control: one process needs none"
    alone = clean() | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = attempt([base, "-m", "reshard", "hf-to-mcore", checkpoint("qwen3"), tmp_path / "two"], env=alone)
    assert done.returncode == 1 and "this needs torch" in done.stderr and "reshard[megatron]" in done.stderr


def test_the_dependencies_are_the_packages_that_messages_name():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert list(BASE.values()) == project["dependencies"]


CALLS = {
    "inspect": "import reshard; reshard.inspect(source)",
    "hf_to_mcore": "import reshard; reshard.hf_to_mcore(source, source)",
    "a module": "import reshard.storage.convert",
    "load": "import reshard.live.load",
    "a dtype": "from reshard.core.dtypes import DTYPES; DTYPES['bfloat16'].numpy()",
    "a hub id": "import reshard.storage.sources.hf_hub as hub; hub.local_directory('someone/something')",
}
MISSING = (
    "this needs huggingface_hub and ml_dtypes and xxhash, which are not installed here: "
    "pip install 'huggingface-hub>=0.25' 'ml_dtypes>=0.4' 'xxhash>=3.0'\n"
)


def test_an_installation_without_dependencies_names_the_line_that_installs_them(built, checkpoint, tmp_path):
    """After ``pip install --no-deps``, as beside a trainer whose packages must stay: only what is
    missing is named."""
    python = environment(tmp_path / "venv", [built[0]], options=["--no-deps"])
    source, command = checkpoint("qwen3"), [python, "-m", "reshard"]
    assert run([python, "-c", "import reshard; print('MegatronLayout' in reshard.__all__)"]) == "True\n"
    done = attempt([*command, "inspect", source])
    line = re.fullmatch(
        r"Error: this needs click and huggingface_hub and .*: pip install ('.*)\n", done.stderr
    )
    assert done.returncode == 1 and line is not None, done.stderr
    requirements = shlex.split(line[1])
    assert requirements[-1] == "xxhash>=3.0" and len(requirements) == 5
    install = [*UV, "pip", "install", "--python", python]
    run([*install, *(name for name in requirements if name.startswith(("click", "numpy")))])
    for name in ("inspect", "check", "diff", "hf-to-mcore", "mcore-to-hf", "plan", "memory"):
        paths = [source] * (1 + (name in ("diff", "hf-to-mcore", "mcore-to-hf")))
        options = {"plan": ["--trainer", "tp=1", "--engine", "tp=1", "--model"], "memory": ["--model"]}.get(
            name, []
        )
        done = attempt([*command, name, *options, *paths])
        assert (
            re.fullmatch(f"Error: {MISSING}", done.stderr) or done.returncode == 0 or name == "mcore-to-hf"
        ), done.stderr
    for statement in CALLS.values():
        assert re.fullmatch(MISSING, error_of(python, statement, source=str(source))), statement
    run([*install, *requirements])
    assert run([*command, "inspect", source]), "the line installs what is missing"


@pytest.mark.parametrize("missing", ["ml_dtypes", "xxhash"])
def test_vllm_says_which_package_its_loader_lacks_and_keeps_the_refit_extension(missing):
    """The real vLLM's plugin, in a process that has imported vLLM and cannot import the package."""
    program = f"""import logging, sys
for name in [name for name in sys.modules if name.partition(".")[0] == "reshard"]:
    del sys.modules[name]
sys.modules[{missing!r}] = None
logging.basicConfig(stream=sys.stdout, format="%(message)s", force=True)
from reshard.engines.vllm.plugin import register
register()
from reshard.engines.vllm.worker import RefitExtension
try:
    from reshard.engines.vllm.load_format.loader import ReshardModelLoader
except __import__("reshard").ReshardError as error:
    print("loader:", error)
print(RefitExtension.__name__)"""
    printed = run([python_of_engine(), "-c", program], env=environment_of_engine())
    needs = f"this needs {missing}, which is not installed here: pip install '{BASE[missing]}'"
    assert f"no --load-format reshard: {needs}" in printed
    assert f"loader: {needs}\nRefitExtension\n" in printed
