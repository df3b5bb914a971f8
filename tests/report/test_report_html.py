"""The page: complete, offline, and safe with any names in it."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_fixtures import HOSTILE, make_lab, make_measurement, make_run

from sinklab.errors import InputError
from sinklab.measuring.findings import Ablation, Propositions
from sinklab.measuring.measurement import Measurement
from sinklab.report.page import content_policy, write_report


class Page(HTMLParser):
    """Elements with their attributes, visible text, and the contents of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text.replace("<wbr>", ""))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        raw = self.elements and self.elements[-1][0] in ("script", "style") and self.cdata_elem
        (self.scripts if raw else self.words).append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def lab_page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    lab = make_lab(tmp_path_factory.mktemp("html") / "lab", seeds=2, hostile=True)
    return Page(write_report([lab]).read_text(encoding="utf-8"))


def test_the_page_states_how_many_models_were_trained_for_how_long(lab_page: Page) -> None:
    assert "Three models were trained for 2,000 steps" in lab_page.text


def test_the_page_gives_mean_and_spread_over_seeds(lab_page: Page) -> None:
    assert "8.8 ± 0.3" in lab_page.text
    assert "mean ± sample standard deviation" in lab_page.text


def test_the_page_has_the_directory_hash_versions_and_recipe_of_each_run(lab_page: Page) -> None:
    assert "seed_1" in lab_page.text
    assert "run hash a1b2c3d4" in lab_page.text
    assert "2.13.0" in lab_page.text
    assert "weight_decay: 0.1" in lab_page.text


def test_the_page_says_which_cells_are_measured_by_proxy_scores(lab_page: Page) -> None:
    assert "The attention scores of sigmoid do not sum to one" in lab_page.text


def test_the_page_shows_ablations_and_propositions_where_there_are_some(tmp_path: Path, lab_page: Page) -> None:
    measured = Measurement.load(make_measurement(tmp_path / "model"))
    ablation = {"name": "mask_first:4", "what": f"four keys hidden {HOSTILE}", "first_target": 6, "sink_rate": [0.0]}
    losses = {"loss_before": 2.5, "loss_after": 3.25, "loss_change": 0.75}
    rates = {"sink_rate_before": 12.5, "sink_rate_after": 0.0}
    highest = dict.fromkeys(f"sink_max{of}_{when}" for of in ("", "_position") for when in ("before", "after"))
    proved = {"number": 1, "statement": "attention is 1/t", "attention_deviation": 1e-7, "bound_slack": None}
    checked = {
        "tokens": 8,
        "length": 64,
        "hidden_deviation": 2e-7,
        "tolerance": 3e-4,
        "dtype": "float32",
        "holds": True,
    }
    found = {
        "ablations": [Ablation.model_validate(ablation | losses | rates | highest)],
        "propositions": Propositions.model_validate({"position": "none"} | proved | checked),
    }
    measured.model_copy(update=found).save(tmp_path / "model")
    page = Page(write_report([tmp_path / "model"]).read_text(encoding="utf-8"))
    assert "mask_first:4 2.5000 3.2500 +0.7500 12.50 0.00" in page.text
    assert f"mask_first:4: four keys hidden {HOSTILE}; targets from position 6 on." in page.text
    assert "none 2.0e-07 1.0e-07 – holds" in page.text
    assert "Ablations:" not in lab_page.text


def test_the_page_shows_the_notes_and_the_row_sums_of_a_measurement(tmp_path: Path) -> None:
    measured = Measurement.load(make_measurement(tmp_path / "model", model="sigmoid"))
    note = f"out of memory: the batch was halved {HOSTILE}"
    sums = np.full((measured.layers, measured.heads), 23.456)
    measured.model_copy(update={"notes": [note], "row_sums": sums}).save(tmp_path / "model")
    page = Page(write_report([tmp_path / "model"]).read_text(encoding="utf-8"))
    assert f"sigmoid : {note}" in page.text
    assert "Row sum of raw scores" in page.text
    assert "23.46" in page.text


def test_every_chart_of_the_page_has_its_place_and_its_specification(lab_page: Page) -> None:
    places = {a["id"] for tag, a in lab_page.elements if a.get("class") == "chart"}
    document = json.loads(lab_page.scripts[[s.startswith('{"config"') for s in lab_page.scripts].index(True)])
    assert places == {f"chart-{key}" for key in document["specs"]}
    lines, heatmaps, norms = 4, 2 * 6, 3
    assert len(places) == lines + heatmaps + norms


def test_the_page_loads_no_external_resources(lab_page: Page) -> None:
    found = [a[name] for _, a in lab_page.elements for name in ("src", "href", "srcset", "data") if name in a]
    anchors = {f"#{a['id']}" for _, a in lab_page.elements if "id" in a}
    assert found
    assert set(found) <= anchors
    assert not re.search(r"url\(|@import", "".join(s for s in lab_page.scripts if s.startswith(":root")))
    policy = next(a["content"] for tag, a in lab_page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy


def test_the_only_scripts_that_run_are_those_in_the_content_policy(lab_page: Page) -> None:
    kinds = [a.get("type") for tag, a in lab_page.elements if tag == "script"]
    assert kinds == ["application/json", "module", "module", "module"]
    running = [s for s in lab_page.scripts if s and not s.startswith(("{", ":root"))]
    policy = next(a["content"] for tag, a in lab_page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == content_policy(running)


@pytest.mark.parametrize("kind", ["run", "model"])
def test_a_hostile_name_is_shown_as_text(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "out"
    made = make_run(folder, name=HOSTILE) if kind == "run" else make_measurement(folder, model=f"a b{HOSTILE}")
    text = write_report([made]).read_text(encoding="utf-8")
    page = Page(text)
    assert [a for tag, a in page.elements if tag == "script"] == [{"type": "application/json", "id": "charts"}] + [
        {"type": "module"}
    ] * 3
    assert "alert(1)" in page.text
    assert "<script>alert" not in text


def test_a_run_in_progress_gets_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", reached=300)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 400, "valid_')
    page = Page(write_report([run]).read_text(encoding="utf-8"))
    assert "step 300 of 2000" in page.text
    assert "not final" in page.text


def test_the_report_is_written_to_the_given_path_with_its_charts_beside_it(tmp_path: Path) -> None:
    made = make_measurement(tmp_path / "model")
    path = write_report([made], out=tmp_path / "elsewhere" / "page.html", formats=("svg",))
    assert path == tmp_path / "elsewhere" / "page.html"
    assert sorted(file.name for file in (path.parent / "charts").iterdir()) == [
        "importance-heads.svg",
        "importance-layers.svg",
        "importance-positions.svg",
        "norm-ratio.svg",
        "norms-first-1.svg",
        "norms-first-2.svg",
        "norms-first-3.svg",
    ]


def test_a_directory_without_runs_leaves_no_report_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing to report"):
        write_report([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_reading_and_the_terminal_work_without_the_chart_libraries() -> None:
    program = (
        "import sys; sys.modules['altair'] = sys.modules['vl_convert'] = None\n"
        "import sinklab, sinklab.report, sinklab.report.collect, sinklab.report.cells\n"
        "import sinklab.commands.results, sinklab.commands.app\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
