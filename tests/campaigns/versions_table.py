"""docs/evidence/versions.md: the outcomes of `tests.campaigns.matrix` as lists, read and written."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tests.tools.environments import REPOSITORY

TABLE = REPOSITORY / "docs" / "evidence" / "versions.md"


@dataclass
class Result:
    """The outcome of a cell, for people; `ok` is None if it was not run."""

    group: str
    name: str
    outcome: str
    ok: bool | None
    date: str


RESULT = re.compile(r"- (?P<name>.+?): (?P<outcome>.*) \((?P<date>\d{4}-\d\d-\d\d)\)")
VERDICTS = {True: "", False: "**fails**: ", None: "not run: "}


def read_table() -> dict[str, Result]:
    """The results on the page, by section and name."""
    results, group = {}, ""
    for line in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.is_file() else []:
        if line.startswith("## "):
            group = line.removeprefix("## ")
        elif result := RESULT.fullmatch(line):
            name, outcome, date = result["name"], result["outcome"], result["date"]
            ok = next(ok for ok in (False, None, True) if outcome.startswith(VERDICTS[ok]))
            results[f"{group}: {name}"] = Result(group, name, outcome.removeprefix(VERDICTS[ok]), ok, date)
    return results


def read_prose() -> dict[str, str]:
    """What people have written on the page, by section; under "" what comes before the first one."""
    prose: dict[str, list[str]] = {"": []}
    group = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            group = line.removeprefix("## ")
            prose[group] = []
        elif not line.startswith("- "):
            prose[group].append(line)
    return {group: "\n".join(lines).strip("\n") for group, lines in prose.items()}


def write_table(kept: dict[str, Result], cells: Sequence[tuple[str, str]]) -> None:
    """Write the results of these cells, each a section and a name, by both, and leave the prose where it is."""
    prose = read_prose()
    lines = [prose[""], ""]
    for group in dict.fromkeys(group for group, _ in cells):
        lines += [f"## {group}", ""]
        for name in [name for of_group, name in cells if of_group == group]:
            result = kept.get(f"{group}: {name}")
            if result is None:
                lines.append(f"- {name}: not run")
                continue
            lines.append(f"- {name}: {VERDICTS[result.ok]}{result.outcome} ({result.date})")
        lines.append("")
        if prose.get(group):
            lines += [prose[group], ""]
    TABLE.write_text("\n".join(lines), encoding="utf-8")
