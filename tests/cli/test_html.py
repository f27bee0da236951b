"""A report is one file that fetches nothing, runs nothing but its own scripts, and says what it was
given, whatever that is."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bokeh.models import ColumnDataSource, HoverTool, TapTool
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from reshard.html import UNENCODABLE, chart, describe, page
from reshard.parity import Limits, Scores, metrics_of
from reshard.parity.html import KEPT, POINTS, WORST, html_report
from reshard.parity.report import ParityReport
from tests.tools.html_pages import Parsed, assert_stands_alone

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><img src=https://example.org/x onerror=alert(2)>",
    "\"'><svg onload=alert(3)>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; ${alert(4)} \\u003cb\\u003e \\",
    "\u2028\x00\n",
    "<!--<script>",
    "@text{safe}",
]
HARMLESS = ["a", "b", "c", "d", "e", "f", "g", "h"]


def make_report(lengths=(9, 33), spread=0.02, names=("A", "B"), noise=False, **fields) -> ParityReport:
    """Make a report of prompts of ids below eight, with logprobs that are `spread` apart."""
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 8, n).tolist() for n in lengths]
    a = [Scores(-random.gamma(1.5, 2.0, n - 1)) for n in lengths]
    b = [Scores(s.logprobs + random.normal(0, spread, len(s.logprobs))) for s in a]
    overall, limits = metrics_of(a, b), Limits(max_abs=0.01)
    floor = {"A again": metrics_of(a, a), "A in bf16": metrics_of(a, b)} if noise else {}
    each = [metrics_of([x], [y]) for x, y in zip(a, b, strict=True)]
    report = ParityReport(
        *names, "fp32", overall, each, limits, limits.exceeded(overall), floor, None, a, b, tokens
    )
    return replace(report, **fields)


def tokenizer_of_words(folder: Path, words: list[str]) -> str:
    """Make a directory with a tokenizer whose ids are the words."""
    folder.mkdir()
    Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])).save(
        str(folder / "tokenizer.json")
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def test_nothing_comes_from_elsewhere_and_no_other_script_may_run():
    parsed = Parsed(html_report(make_report(noise=True, unmeasured=["kl was not measured"])))
    assert_stands_alone(parsed)
    assert len(parsed.scripts) == 3 and parsed.charts.roots
    assert "Note: kl was not measured." in parsed.text and "max_abs is " in parsed.text
    for bad in (
        "<img src='https://example.org/x'>",
        "<link href='https://example.org/x'>",
        "<script>alert(1)</script>",
    ):
        with pytest.raises(AssertionError):
            assert_stands_alone(Parsed(html_report(make_report()).replace("<h1>", bad + "<h1>")))


def test_the_charts_have_every_token_bit_for_bit_and_the_pointer_names_it(tmp_path):
    report = make_report(lengths=(9, 33, 2))
    charts = Parsed(html_report(report, [tokenizer_of_words(tmp_path / "words", HARMLESS)])).charts.roots
    scatter, histogram, positions = charts
    source = scatter.renderers[-1].data_source
    assert source is positions.renderers[-1].data_source, "so that a click picks a token out in both"
    a, b = (np.concatenate([s.logprobs for s in scores]) for scores in (report.scores_a, report.scores_b))
    where = [
        (p, t, report.tokens[p][t], f'"{HARMLESS[report.tokens[p][t]]}"')
        for p in range(3)
        for t in range(1, len(report.tokens[p]))
    ]
    assert list(zip(*(list(source.data[name]) for name in ("prompt", "token", "id", "text")))) == where
    assert (
        np.array_equal(source.data["a"], a)
        and np.array_equal(source.data["b"], b)
        and not np.array_equal(a, b)
    )
    assert np.array_equal(source.data["difference"], a - b)
    bars = histogram.renderers[-1].data_source.data
    inside = [int(((a - b >= low) & (a - b < high)).sum()) for low, high in zip(bars["from"], bars["to"])]
    inside[-1] += 1  # the largest closes the last
    assert bars["tokens"].tolist() == inside and sum(inside) == len(a)
    for drawn in (scatter, positions):
        [hover], [tap] = (
            [tool for tool in drawn.tools if isinstance(tool, kind)] for kind in (HoverTool, TapTool)
        )
        assert [column for _, column in hover.tooltips][:4] == ["@prompt", "@token", "@text", "@id"]
        assert hover.renderers == tap.renderers == [drawn.renderers[-1]]


def test_of_many_tokens_those_that_differ_most_are_shown_and_the_page_says_so():
    report = make_report(lengths=[130] * 60)
    parsed = Parsed(html_report(report))
    data = parsed.charts.roots[0].renderers[-1].data_source.data
    apart = [np.abs(x.logprobs - y.logprobs) for x, y in zip(report.scores_a, report.scores_b)]
    every = sorted(
        ((p, t) for p in range(60) for t in range(1, 130)), key=lambda at: -apart[at[0]][at[1] - 1]
    )
    shown = list(zip(data["prompt"].tolist(), data["token"].tolist()))
    assert (
        len(set(shown)) == len(shown) == POINTS and shown == sorted(shown) and set(every[:KEPT]) <= set(shown)
    )
    assert (
        f"show {POINTS} of {60 * 129} tokens" in parsed.text
        and "The charts of points" not in Parsed(html_report(make_report())).text
    )
    assert sum(parsed.charts.roots[1].renderers[-1].data_source.data["tokens"]) == 60 * 129, (
        "the histogram has all"
    )
    table = [
        tuple(int(cell) for cell in parsed.cells[i : i + 2])
        for i in range(len(parsed.cells) - 60 * 6 - WORST * 7, len(parsed.cells) - 60 * 6, 7)
    ]
    assert table == every[:WORST]


def test_hostile_texts_and_names_are_text_and_nothing_else(tmp_path):
    names = tuple(f"Megatron-Core of /data/{text}" for text in HOSTILE[:2])
    fields = dict(lengths=(40, 40), unmeasured=HOSTILE[:3], exceeded=HOSTILE[3:])
    harmless = fields | dict(unmeasured=HARMLESS[:3], exceeded=HARMLESS[3:])
    text = html_report(
        make_report(names=names, **fields), [tokenizer_of_words(tmp_path / "hostile", HOSTILE)]
    )
    hostile = Parsed(text)
    calm = Parsed(html_report(make_report(**harmless), [tokenizer_of_words(tmp_path / "calm", HARMLESS)]))
    assert hostile.tags == calm.tags and len(hostile.scripts) == 3
    assert [name for name, _ in hostile.attributes] == [name for name, _ in calm.attributes]
    assert_stands_alone(hostile)
    shown = {
        json.dumps(word if len(word) <= 40 else word[:40] + "...", ensure_ascii=False) for word in HOSTILE
    }
    data = hostile.charts.roots[0].renderers[-1].data_source.data
    assert (
        set(data["text"]) == shown
        and shown & set(hostile.cells)
        and all(name in hostile.text for name in names)
    )
    assert "49" not in {cell for cell in hostile.cells if "7 *" in cell}
    tooltips = [tool for drawn in hostile.charts.roots for tool in drawn.tools if isinstance(tool, HoverTool)]
    assert not any("{safe}" in column for tool in tooltips for _, column in tool.tooltips), (
        "Bokeh escapes what is not marked so"
    )


def test_a_name_that_utf8_does_not_have_is_written_and_the_scripts_still_may_run(tmp_path):
    (tmp_path / "page.html").write_text(
        html_report(make_report(names=("a\udcff", "b"))), encoding="utf-8", errors=UNENCODABLE
    )
    assert_stands_alone(Parsed((tmp_path / "page.html").read_text(encoding="utf-8")))


def test_tokens_have_their_numbers_where_tokenizers_differ_or_there_is_none(tmp_path):
    one, other = (
        tokenizer_of_words(tmp_path / name, words)
        for name, words in (("one", HARMLESS), ("other", HARMLESS[::-1]))
    )
    differ = Parsed(html_report(make_report(), [one, other]))
    assert "tokens are shown by number alone: the tokenizers of" in differ.text
    for parsed in (differ, Parsed(html_report(make_report()))):
        assert set(parsed.charts.roots[0].renderers[-1].data_source.data["text"]) == {"-"}


def test_another_report_is_a_template_and_its_charts(tmp_path):
    """Memory per stage, as bars."""
    template = tmp_path / "memory.html"
    template.write_text(
        '{% extends "page.html" %}{% from "table.html" import table %}{% block title %}Memory{% endblock %}'
        "{% block body %}{{ charts.memory }}{{ table(['stage', 'GiB'], rows) }}{% endblock %}",
        encoding="utf-8",
    )
    stages, sizes = ["0", "<1>"], np.array([41.5, 38.25])
    drawn = chart("Memory", "stage", "GiB", x_range=stages)
    source = ColumnDataSource({"stage": stages, "size": sizes})
    describe(
        drawn,
        drawn.vbar(x="stage", top="size", width=0.8, source=source),
        {"stage": "@stage", "GiB": "@size{%.2f}"},
    )
    parsed = Parsed(page(template, {"memory": drawn}, rows=zip(stages, sizes)))
    assert_stands_alone(parsed)
    assert parsed.cells == ["0", "41.5", "<1>", "38.25"]
    [root] = parsed.charts.roots
    assert root.renderers[0].data_source.data["size"].tolist() == sizes.tolist()
    [hover] = [tool for tool in root.tools if isinstance(tool, HoverTool)]
    assert hover.formatters == {"@size": "printf"}
    assert parsed.tags.count("div") == 2 and f"data-root-id={root.id}" in " ".join(
        f"{n}={v}" for n, v in parsed.attributes
    )
