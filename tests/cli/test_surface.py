"""The command line in bad surroundings: what nobody expected, streams that are closed, full or of
another encoding, interrupts."""

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from reshard import check
from reshard.cli.main import cli
from tests.tools.disk import ended

COMMAND = [sys.executable, "-m", "reshard"]


def run(*args, module=None, tmp_path=None, **options):
    """A command in a process of its own; `module` is Python that it finds in place of numpy."""
    environment = os.environ | options.pop("env", {})
    if module is not None:
        environment["TMPDIR"] = str(tmp_path)
        (tmp_path / "instead").mkdir(exist_ok=True)
        (tmp_path / "instead" / "numpy.py").write_text(module, encoding="utf-8")
        environment["PYTHONPATH"] = str(tmp_path / "instead")
    return subprocess.run(
        [*COMMAND, *map(str, args)], capture_output=True, env=environment, **{"text": True} | options
    )


@pytest.mark.parametrize(("module", "said"), [
    ("raise RuntimeError('first line\\nsecond')", "unexpected RuntimeError: first line. Please report it"),
    ("def f(): f()\nf()", "unexpected RecursionError: maximum recursion depth exceeded"),
    ("raise EOFError('Ran out of input')", "unexpected EOFError: Ran out of input"),
    ("raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad')", "unexpected UnicodeDecodeError"),
    ("raise OSError('without a number')", "unexpected OSError: without a number"),
    ("raise MemoryError", "out of memory"),
    ("raise OSError(5, 'Input/output error', 'some/file')", "the system refused some/file: Input/output error"),
    ("raise SystemExit('a library gives up')", "Error: a library gives up"),
])  # fmt: skip
def test_what_nobody_expected_is_a_sentence_that_asks_for_a_report(module, said, checkpoint, tmp_path):
    done = run("inspect", checkpoint("qwen3"), module=module, tmp_path=tmp_path)
    assert (
        done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr and done.stdout == ""
    )
    written = list(tmp_path.glob("reshard-error-*.txt"))
    assert len(written) == ("unexpected" in said)
    for path in written:
        text = path.read_text(encoding="utf-8")
        assert (
            str(path) in done.stderr
            and "inspect" in text
            and "Traceback (most recent call last)" in text
            and "Python 3." in text
        )


def test_a_traceback_is_shown_to_who_asks_for_it(tmp_path):
    for value, shown in (("1", 1), ("0", 0), ("", 0)):
        done = run("inspect", tmp_path / "absent", env={"RESHARD_DEBUG": value})
        assert done.returncode == 1 and done.stderr.count("Traceback") == shown


@pytest.mark.parametrize(("arguments", "status", "message"), [
    (["inspect", "no/such/place/at/all"], 1, "neither a directory nor a hub id"),
    (["inspect"], 2, "Missing argument 'PATH'"),
    (["inspect", "x", "--worst"], 2, "No such option"),
    (["inspekt", "x"], 2, "did you mean inspect?"),
])  # fmt: skip
def test_an_error_is_json_too_where_that_was_asked_for(arguments, status, message):
    done = run(*arguments, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"] == status and message in found["error"]
    assert found["error"] in done.stderr and "Traceback" not in done.stderr
    if status == 1:
        assert run(*arguments).stdout == "", "only then"
        assert run(*arguments, "--json", env={"RANK": "1", "WORLD_SIZE": "2"}).stdout == "", (
            "one object, of several processes"
        )


@pytest.mark.parametrize(("given", "meant"), [
    ("hf-to-mcor", "hf-to-mcore"), ("hf_to_mcore", "hf-to-mcore"), ("mcore2hf", "mcore-to-hf"), ("INSPECT", "inspect"),
    ("verify", "the commands are hf-to-mcore, mcore-to-hf, fsdp-to-hf, mcore-to-mcore, lora-to-peft"),
])  # fmt: skip
def test_a_mistyped_command_gets_a_suggestion(given, meant):
    done = CliRunner().invoke(cli, [given, "x"])
    assert done.exit_code == 2 and f"No such command '{given}': " in done.output and meant in done.output


def test_a_mistyped_option_gets_a_suggestion():
    assert (
        "'--max-shard-size'?"
        in CliRunner().invoke(cli, ["mcore-to-hf", "a", "b", "--max-shard-sise", "5GB"]).output
    )
    assert (
        "'--tensor-model-parallel-size'"
        in CliRunner().invoke(cli, ["hf-to-mcore", "a", "b", "--tensor-parallel-size", "2"]).output
    )


INTERRUPT = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(30)"


@pytest.mark.parametrize("module", [
    INTERRUPT,
    (f"try:\n    {INTERRUPT.replace(chr(10), chr(10) + '    ')}\nexcept KeyboardInterrupt:\n    raise "
     "ImportError('numpy is broken')"),
    ("class Finalized:\n    def __del__(self):\n        "
     f"{INTERRUPT.replace(chr(10), chr(10) + '        ')}\nFinalized()"),
], ids=["plain", "taken for something else", "in a finalizer"])  # fmt: skip
def test_an_interrupt_during_imports_is_an_interrupt(module, checkpoint, tmp_path):
    done = run("inspect", checkpoint("qwen3"), module=module, tmp_path=tmp_path)
    assert done.returncode == 130 and done.stderr.strip() == "Interrupted." and done.stdout == ""
    (tmp_path / "instead" / "click.py").write_text(INTERRUPT, encoding="utf-8")
    done = run("--help", module=module, tmp_path=tmp_path)
    assert done.returncode == 130 and done.stderr == "Interrupted.\n", "before any command"


def test_an_interrupt_once_a_command_has_ended_leaves_no_traceback():
    code = (
        "import os, signal, sys\nfrom reshard.cli import main, signals\n"
        "signals.flush = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.argv = ['reshard', '--version']\nmain.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "Interrupted.\n"


def test_what_ignores_interrupts_goes_on_ignoring_them(checkpoint, tmp_path):
    module = f"{INTERRUPT.replace('30', '0')}\nraise RuntimeError('went on')"
    done = run("inspect", checkpoint("qwen3"), module=module, tmp_path=tmp_path,
               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))  # fmt: skip
    assert done.returncode == 1 and "went on" in done.stderr


def test_streams_that_are_closed_full_or_left_early(checkpoint, tmp_path):
    source, python = checkpoint("qwen3"), f"{sys.executable} -m reshard"

    def shell(line):
        return subprocess.run(["bash", "-c", line], capture_output=True, text=True)

    left = shell(f"{python} inspect {source} --tensors | head -1; echo ${{PIPESTATUS[0]}}")
    assert left.stderr == "" and left.stdout.startswith("format")
    done = shell(f"{python} inspect {source} --json > /dev/full")
    assert done.returncode == 1 and done.stderr == "Error: the system refused: No space left on device\n"
    assert shell(f"{python} diff {source} {source} 2> /dev/full").returncode == 0
    assert shell(f"{python} inspect {tmp_path}/absent 2> /dev/full").returncode == 1
    assert (
        shell(f"{python} hf-to-mcore {source} {tmp_path}/mcore >&- 2>&- <&-").returncode == 0
        and check(tmp_path / "mcore").ok
    )
    assert shell(f"{python} inspect {tmp_path}/absent --json >&- 2>&-").returncode == 1


@pytest.mark.parametrize("environment", [
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii"},
], ids=["C", "ascii"])  # fmt: skip
def test_names_that_the_terminal_lacks_and_files_in_utf_8(environment, checkpoint, tmp_path):
    """Converted, described, compared and checked in any locale; what is not written in the locale's
    encoding is read so either."""
    folder = os.fsencode(tmp_path) + b"/gr\xc3\xbc\xc3\x9fe-\xff"
    os.mkdir(folder)
    os.symlink(checkpoint("qwen3"), folder + b"/hf")
    config = json.loads((checkpoint("qwen3") / "config.json").read_text(encoding="utf-8")) | {
        "_comment": "gr\u00fc\u00dfe"
    }
    (tmp_path / "config.json").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    strict = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-m", "reshard"]
    for arguments in (
        [b"hf-to-mcore", folder + b"/hf", folder + b"/mcore"], [b"check", folder + b"/mcore"],
        [b"mcore-to-hf", folder + b"/mcore", folder + b"/back", b"--hf-config", os.fsencode(tmp_path / "config.json"),
         b"--max-shard-size", b"100KB"],
        [b"diff", folder + b"/hf", folder + b"/back"], [b"inspect", folder + b"/back"],
    ):  # fmt: skip
        done = subprocess.run([*strict, *arguments], capture_output=True, env=os.environ | environment)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [*strict, b"inspect", folder + b"/absent"], capture_output=True, env=os.environ | environment
    )
    assert (
        done.returncode == 1
        and b"absent is neither a directory" in done.stderr
        and b"Traceback" not in done.stderr
    )


def test_a_terminal_that_goes_away_does_not_fail_the_work(checkpoint, tmp_path):
    import pty

    master, slave = pty.openpty()
    wait = f"""import os, sys, time
for _ in range(30_000):
    if os.path.exists({str(tmp_path / "gone")!r}):
        break
    time.sleep(0.01)
sys.path.remove({str(tmp_path)!r})
del sys.modules["resource"]
import resource"""
    (tmp_path / "resource.py").write_text(wait, encoding="utf-8")
    process = subprocess.Popen(
        [*COMMAND, "hf-to-mcore", str(checkpoint("qwen3")), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=slave,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    os.close(slave)
    with ended(process):
        assert os.read(master, 1), "the bar is there"
        os.close(master)
        (tmp_path / "gone").touch()
        out = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and out.startswith(b"qwen3, ") and check(tmp_path / "out").ok


def test_a_log_that_is_no_terminal_gets_lines_of_progress_of_the_first_process_alone():
    code = """
from reshard.cli import output
output._Lines.SECONDS = 0
with output.progress_bar("check") as progress:
    if progress is not None:
        progress(1_000_000, 4_000_000)
        progress(3_000_000, 4_000_000)
"""
    said = {}
    for rank in "01":
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"RANK": rank}
        )
        said[rank] = done.stderr.splitlines()
    first, second = said["0"]
    assert first == "check: 25% 1.00 MB of 4.00 MB" and second.startswith("check: 75% 3.00 MB of 4.00 MB, ")
    assert said["1"] == []
