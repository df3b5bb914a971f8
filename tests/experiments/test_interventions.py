"""The catalogue and registry of interventions: neutral values change nothing, and every variant trains."""

from pathlib import Path
from statistics import mean

import pytest
import torch
import yaml
from sampling import one_in

from sinklab.attention.config import kinds_of
from sinklab.commands.results import settings_of
from sinklab.data.loader import TokenDataset
from sinklab.data.prepare import prepare
from sinklab.data.prepare import settings_of as data_settings
from sinklab.errors import SinklabError
from sinklab.interventions import CHOICES, NEUTRAL, NOT_INTERVENTIONS, VARIANTS, catalogue
from sinklab.model.config import ModelConfig
from sinklab.train.loop import Trainer
from sinklab.train.recipe import Recipe, build_recipe, load_recipe
from sinklab.train.run import open_run

BASE = {
    "model": {"layers": 2, "width": 32, "heads": 2, "ffn_width": 48, "context": 32},
    "data": {
        "source": "synthetic:bigram_backcopy:length=33,documents=300",
        "tokenizer": "words",
        "valid_fraction": 0.1,
    },
    "optim": {"lr": 3e-3},
    "schedule": {"shape": "flat", "warmup_steps": 4},
    "train": {"steps": 50, "batch_size": 4, "eval_sequences": 8},
    "metric": {"sequences": 8, "length": 32},
}
# The fused kernel serves causal masks only and rounds differently from the blocks that serve all masks.
ONE_BACKEND = {"model": {"attention": {"backend": "chunked"}}}
DOCS = Path(__file__).parents[2] / "docs" / "interventions.md"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Tokens of a small synthetic corpus, every document a chunk."""
    source = build_recipe(BASE).data.source
    return prepare(data_settings(source, "words", valid_fraction=0.1), tmp_path_factory.mktemp("data"))


def losses(recipe: Recipe, dataset: TokenDataset, out: Path, steps: int) -> tuple[Trainer, list[float]]:
    """Training loss of each of `steps` updates, in nats per token."""
    trainer = Trainer(open_run(recipe, dataset, out))
    return trainer, [trainer._update() for _ in range(steps)]


@pytest.mark.parametrize("name", one_in(12, VARIANTS))
def test_every_variant_learns_in_fifty_steps(name: str, dataset: TokenDataset, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    recipe = build_recipe(BASE, variant.overlay)
    try:
        _, loss = losses(recipe, dataset, tmp_path, 50)
    except SinklabError as error:
        if variant.may_diverge and "diverged" in str(error):
            return
        raise
    assert variant.may_diverge or mean(loss[-5:]) < mean(loss[:5]) - 0.1


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_neutral_value_is_the_baseline_bit_for_bit(key: str, dataset: TokenDataset, tmp_path: Path) -> None:
    neutral = NEUTRAL[key]
    plain, changed = (build_recipe(BASE, ONE_BACKEND, overlay) for overlay in (neutral.against or {}, neutral.values))
    baseline, expected = losses(plain, dataset, tmp_path / "baseline", 8)
    trainer, loss = losses(changed, dataset, tmp_path / "neutral", 8)
    assert loss == expected
    weights = trainer.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in baseline.model.state_dict().items())


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_neutral_value_is_another_recipe_than_its_baseline(key: str) -> None:
    """A recipe compared with itself would show nothing."""
    neutral = NEUTRAL[key]
    assert build_recipe(BASE, neutral.values) != build_recipe(BASE, neutral.against or {})


def test_the_catalogue_lists_the_neutral_value_of_every_setting() -> None:
    rows = {f"{row.key} ({row.kind})": row for row in catalogue()} | {row.key: row for row in catalogue()}
    kinds_as_a_whole = {key for key in NEUTRAL if key in rows and rows[key].is_kind}
    assert {key: rows[key].neutral for key in set(NEUTRAL) - kinds_as_a_whole} == {
        key: NEUTRAL[key].said for key in set(NEUTRAL) - kinds_as_a_whole
    }
    assert rows["model.attention.operation.start (scalable_softmax)"].neutral == ""
    assert rows["model.attention.operation.alpha (softmax)"].neutral == "1"


def test_a_default_that_is_listed_as_neutral_leaves_the_default_recipe() -> None:
    """`losses.tweo.tau=3`, the default within an optional section, would add that section."""
    rows = [row for row in catalogue() if row.neutral and row.neutral == row.default and row.kind is None]
    for row in rows:
        value = yaml.safe_load(row.default)
        for part in reversed(row.key.split(".")):
            value = {part: value}
        assert build_recipe({}, value) == build_recipe({}), row.key
    assert len(rows) > 15


def test_the_catalogue_explains_every_row() -> None:
    rows = catalogue()
    assert [row.key for row in rows if not row.explanation] == []
    assert all(row.values for row in rows)
    assert {"alibi", "sink_token", "softpick", "head", "muon", "document"} <= {row.kind for row in rows}


def test_the_catalogue_gives_the_bounds_of_each_type_that_a_value_may_have() -> None:
    rows = {row.key: row for row in catalogue()}
    assert rows["model.attention.operation.lambda_init"].values == "depth | number > 0 and < 1"
    assert rows["optim.clip"].values == "number > 0 | null"
    assert rows["model.attention.bias.count"].values == "integer >= 1 and <= 10,000,000"


def test_every_key_of_the_model_is_an_intervention_or_listed_as_not_one() -> None:
    keys = {row.key for row in catalogue()}
    for name in ModelConfig.model_fields:
        key = f"model.{name}"
        assert key in NOT_INTERVENTIONS or any(k == key or k.startswith(f"{key}.") for k in keys), key


def test_every_kind_of_every_choice_is_a_variant_that_is_trained() -> None:
    used = set()
    for variant in VARIANTS.values():
        recipe = build_recipe(BASE, variant.overlay)
        model, attention = recipe.model, recipe.model.attention
        used |= {recipe.optim.name, model.position.kind, model.gate.kind, model.init.kind, model.projection.kind}
        used |= {model.mixer.kind, model.value_residual.kind}
        used |= {attention.operation.kind, attention.bias.kind, attention.mask.kind}
    assert {row.kind for row in catalogue() if row.kind is not None} <= used


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_printed_as_settings_that_give_its_recipe(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(yaml.safe_dump(BASE), encoding="utf-8")
    assert load_recipe(str(base), settings_of(VARIANTS[name].overlay)) == build_recipe(BASE, VARIANTS[name].overlay)


def test_no_two_kinds_give_an_example_the_same_name() -> None:
    names = [name for choice in CHOICES for kind in kinds_of(choice) for name in kind.examples]
    assert len(names) == len(set(names))
    assert set(names) <= set(VARIANTS)


@pytest.mark.parametrize(("key", "kind"), [(row.key, row.kind) for row in catalogue() if row.is_kind])
def test_every_kind_has_a_line_in_the_documentation(key: str, kind: str) -> None:
    """A row of the table in the section whose heading names the key of the choice."""
    sections = DOCS.read_text(encoding="utf-8").split("\n## ")
    section = next(section for section in sections if f"`{key}`" in section.partition("\n")[0])
    assert [line for line in section.splitlines() if line.startswith(f"| `{kind}`")]


def test_the_documentation_names_every_key() -> None:
    text = DOCS.read_text(encoding="utf-8")
    missing = {row.key for row in catalogue() if f"`{row.key}`" not in text and not row.kind}
    assert not missing
