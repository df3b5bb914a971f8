"""Text of a page: its title, its lead, and the note below the leaderboard."""

import re
import shutil
from pathlib import Path

import pytest
from made_assessment import make_assessment
from report_fixtures import make_measurement
from sweep_fixtures import CELLS, EXPERIMENTS, MadeCell, make_sweep
from test_report_html import Page

from sinklab.measuring.measurement import Measurement
from sinklab.report.cells import headline
from sinklab.report.collect import collect
from sinklab.report.data import ReportData
from sinklab.report.packing import pack_sweep
from sinklab.report.page import write_report
from sinklab.survey.measure import Outcome
from sinklab.survey.suites import Survey

ONE = {"table_4": EXPERIMENTS["table_4"]}
BOARD = {"mitigations": EXPERIMENTS["mitigations"]}


def page_of(folder: Path) -> Page:
    return Page(write_report([folder]).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("experiments", "title"), [(ONE, "table_4"), (EXPERIMENTS, "experiments at scale tiny")], ids=["one", "several"]
)
def test_the_title_of_a_sweep_names_its_experiments_wherever_it_was_packed(
    tmp_path: Path, experiments: dict, title: str
) -> None:
    packed = pack_sweep(collect([make_sweep(tmp_path / "sweep", experiments)]), tmp_path / "contpack")
    shutil.copytree(packed, tmp_path / "continued")
    for page in (packed / "report.html", write_report([tmp_path / "continued"], tmp_path / "page.html")):
        text = page.read_text(encoding="utf-8")
        assert f"<h1>Attention sinks: {title}</h1>" in text
        assert re.search(r'<p class="lead">(One experiment|Five experiments) at scale tiny: ', text)


def test_the_lead_names_a_model_in_the_working_directory(tmp_path: Path) -> None:
    measured = {name: Measurement.load(make_measurement(tmp_path / name)) for name in ("a", "b")}
    assert headline(ReportData.of_survey(Survey("domains", {"model": "."}, Outcome(measured))))[0].startswith(
        ". on two domains: "
    )


@pytest.mark.parametrize(("on_the_bias", "said"), [(34.0, True), (0.0, False), (0.02, False)])
def test_the_lead_names_the_largest_sink_on_a_bias_only_where_there_is_one(
    tmp_path: Path, on_the_bias: float, said: bool
) -> None:
    cell = MadeCell((0.2, on_the_bias, 1.4, 2.85), {"model.attention.bias": "k"})
    data = collect([make_sweep(tmp_path / "sweep", ONE, {**CELLS, "k_biases": cell, "sink_token": cell})])
    text = " ".join(headline(data))
    assert "The sink on the first token is strongest in “softmax”" in text
    assert ("the strongest sink on a bias" in text) == said


def test_the_page_of_a_sweep_begins_with_claims_that_hold_and_ends_with_counts_and_rule(tmp_path: Path) -> None:
    html = write_report([make_sweep(tmp_path / "sweep", ONE)]).read_text(encoding="utf-8")
    text = Page(html).text
    order = ("Holds (1 of", "Sink rate during training", "Our results", "Claims at tiny", "Decision rule")
    places = [text.rindex(part) for part in order]
    assert places == sorted(places)
    assert re.search(r'<details>\s*<summary><h2 id="provenance">', html)
    packed = pack_sweep(collect([tmp_path / "sweep"]), tmp_path / "packed")
    assert "Sink rate during training" in (packed / "report.html").read_text(encoding="utf-8")


def test_the_note_of_the_leaderboard_explains_the_columns_that_it_has_and_no_others(tmp_path: Path) -> None:
    alone = page_of(make_sweep(tmp_path / "alone", BOARD)).text
    assert "Retuned" not in alone
    assert "sinklab assess" not in alone

    tuned = make_sweep(tmp_path / "tuned")
    assert "Retuned: the lowest loss over several learning rates" in page_of(tuned).text
    for run in tuned.glob("softmax-*"):
        make_assessment(run, str(run), 0.5, streaming=None, skipped={"streaming": "no such positions"})
    assessed = page_of(tuned).text
    assert "nats per token, relative to the unchanged model (sinklab assess)" in assessed
    assert "Sink hidden: " not in assessed
    assert "Streaming: " not in assessed


def test_the_page_of_one_model_is_called_by_its_name_and_begins_with_four_tiles(tmp_path: Path) -> None:
    folder = make_measurement(tmp_path / "m1", model="/models/Small-1M")
    html = write_report([folder]).read_text(encoding="utf-8")
    assert "<h1>Attention sinks: Small-1M</h1>" in html
    tiles = html[html.index('<dl class="tiles">') : html.index("</dl>")]
    assert re.findall(r"<dt>(.*?)</dt>", tiles) == ["Sink rate", "Layers", "Sink on", "Streaming"]
    assert "<b>BOS</b>" in tiles
    assert "run sinklab assess MODEL --quick" in tiles
    make_assessment(folder / "assessed", model="/models/Small-1M")
    assert "<b>+0.50 nats</b>" in write_report([folder]).read_text(encoding="utf-8")
    make_measurement(tmp_path / "m2", model="/models/Other")
    both = write_report([folder, tmp_path / "m2"], tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<h1>Attention sinks: Small-1M and Other</h1>" in both
    assert 'class="tiles"' not in both
