"""Recipes: layering, shorthand, and errors that name the field."""

import re
from pathlib import Path

import pytest
import yaml

from sinklab.errors import InputError
from sinklab.train.recipe import Recipe, build_recipe, load_recipe

NUMBERS = [
    "model.width",
    "model.norm.eps",
    "model.position.theta",
    "model.attention.softcap",
    "model.attention.operation.alpha",
    "optim.lr",
    "optim.clip",
    "optim.weight_decay",
    "schedule.min_lr",
    "data.valid_fraction",
    "train.peak_flops",
    "train.steps",
    "metric.eps",
    "seed",
]
INTERVENTIONS = ["bos=false", "token_budget=9", "fixed_token={positions: [2]}", "random_tokens={start: 1, end: 3}"]
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_recipes_are_valid(path: Path) -> None:
    needed = ["model.init_from=MODEL"] if path.stem == "continued" else []
    assert load_recipe(str(path), needed) == load_recipe(path.stem, needed)


def test_the_continued_recipe_needs_a_checkpoint_or_null() -> None:
    with pytest.raises(
        InputError, match=r"continued requires a value for model\.init_from: add --set model\.init_from=VALUE"
    ):
        load_recipe("continued", ["data.source=text.jsonl"])
    assert load_recipe("continued", ["model.init_from=null"]).model.init_from is None
    assert load_recipe("continued", ["model.init_from=MODEL"]).model.init_from == "MODEL"


def test_the_60m_recipe_is_the_papers() -> None:
    recipe = load_recipe("60m")
    model, optim = recipe.model, recipe.optim
    assert optim.name == "adamw"
    assert (model.layers, model.heads, model.width, model.ffn_width) == (10, 8, 768, 1536)
    assert (optim.lr, optim.weight_decay, optim.betas, optim.clip) == (4e-4, 0.1, (0.9, 0.95), 1.0)
    assert recipe.train.batch_size * model.context == 1048576


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optim: {lr: 0.001}\nmodel: {layers: 3}\n")
    recipe = load_recipe(str(file), ["optim.lr=3e-3"])
    assert (recipe.optim.lr, recipe.model.layers, recipe.model.heads) == (3e-3, 3, Recipe().model.heads)


def test_a_choice_may_be_given_by_its_name() -> None:
    recipe = load_recipe("tiny", ["model.attention.operation=sigmoid", "model.attention.bias=kv"])
    assert recipe.model.attention.operation.kind == "sigmoid"
    assert recipe.model.attention.bias.kind == "kv"


def test_another_kind_drops_the_values_of_the_old_kind() -> None:
    recipe = load_recipe(
        "tiny", ["model.attention.mask={kind: window, width: 8}", "model.attention.mask={kind: prefix, length: 2}"]
    )
    assert recipe.model.attention.mask.model_dump() == {"kind": "prefix", "length": 2}


def test_overrides_mean_the_same_in_any_order() -> None:
    chosen = ["optim.lr=0.5", "optim.name=sgd", "model.attention.mask.width=8", "model.attention.mask=window"]
    recipe, reversed_ = load_recipe("tiny", chosen), load_recipe("tiny", chosen[::-1])
    assert recipe == reversed_
    assert (recipe.optim.name, recipe.optim.lr) == ("sgd", 0.5)
    assert recipe.model.attention.mask.model_dump() == {"kind": "window", "width": 8}


def test_a_recipe_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"cannot read .*recipe\.yaml"):
        load_recipe(str(tmp_path / "recipe.yaml"))


def test_compile_accepts_on_and_off_of_yaml() -> None:
    assert [load_recipe("tiny", [f"train.compile={word}"]).train.compile for word in ("on", "off")] == ["on", "off"]


@pytest.mark.parametrize("name", ["", "../up", "a/b", "."])
def test_a_name_must_be_usable_in_a_path(name: str) -> None:
    with pytest.raises(
        InputError, match=r"name: .* cannot be used in a directory name: use a non-empty name without slashes"
    ):
        build_recipe({"name": name})


def test_a_resolved_recipe_is_read_back_unchanged(tmp_path: Path) -> None:
    recipe = load_recipe("tiny", ["model.attention.bias=kv", "data.random_tokens={start: 1, end: 3}"])
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.to_yaml())
    assert load_recipe(str(file)) == recipe


def test_the_hash_covers_the_keys_that_change_the_result() -> None:
    base = load_recipe("tiny")
    assert base.content_hash("d") == load_recipe("tiny", ["name=other"]).content_hash("d")
    assert base.content_hash("d") == load_recipe("tiny", ["train.micro_batch=8"]).content_hash("d")  # only rounding
    others = [load_recipe("tiny", ["seed=1"]), load_recipe("tiny", ["model.attention.bias=k"])]
    others += [load_recipe("tiny", [f"data.{change}"]) for change in INTERVENTIONS]
    hashes = {base.content_hash("d"), base.content_hash("e"), *(recipe.content_hash("d") for recipe in others)}
    assert len(hashes) == 2 + len(others)


@pytest.mark.parametrize("number", ["inf", ".inf", "-.inf", "nan", ".nan", "1e400"])
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_of_a_recipe_are_finite(key: str, number: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"{key}: Input should be a finite number")):
        load_recipe("tiny", [f"{key}={number}"])


LATER = [
    "model.exclusive=true",
    "model.value_residual=fixed",
    "model.norm.head_norm=true",
    "model.norm.head_norm=per_head",
    "model.norm.qk_norm=per_head",
    "model.norm.gate_rank=1",
    "train.float32_matmul=high",
]


@pytest.mark.parametrize(
    ("neutral", "changed"),
    [
        ("model.init=declared", "model.init=torch"),
        ("model.projection=full", "model.projection=latent"),
        ("model.mixer=attention", "model.mixer=gated_delta"),
        ("model.pattern=null", "model.pattern={every: 2, position: none}"),
        ("model.pattern=null", "model.pattern={every: 2, bias: k}"),
        ("model.position.share=1", "model.position.share=0.5"),
    ],
)
def test_the_neutral_value_of_a_key_added_later_keeps_earlier_hashes(neutral: str, changed: str) -> None:
    before = "40d507f639ef7edb"  # of `tiny-128` before these keys existed
    assert load_recipe("tiny-128", [neutral]).content_hash("d") == before
    assert load_recipe("tiny-128", [changed]).content_hash("d") != before


@pytest.mark.parametrize("changed", LATER)
def test_a_key_added_later_changes_the_hash_only_if_its_value_is_not_neutral(changed: str) -> None:
    before = {"": "40d507f639ef7edb", "model.attention.bias=sink_token": "ec8395dedb0ef0a9"}  # of `tiny-128`
    for override, known in before.items():
        overrides = [override] if override else []
        assert load_recipe("tiny-128", overrides).content_hash("d") == known
        if override:
            assert load_recipe("tiny-128", [override, "model.attention.bias.count=1"]).content_hash("d") == known
            assert load_recipe("tiny-128", [override, "model.attention.bias.count=2"]).content_hash("d") != known
        assert load_recipe("tiny-128", [*overrides, changed]).content_hash("d") != known


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=100000000", "model.width: Input should be less than or equal to 10000000"),
        ("model.layers=1000000", "model.layers: Input should be less than or equal to 10000"),
        ("model.vocab_size=1e12", "model.vocab_size: Input should be less than or equal to 10000000"),
        ("seed=100000000000000000000", "seed: 100000000000000000000 is out of range: integers must be greater than -2"),
        ("model.attention.mask={kind: window, width: 100000000000000000000}", "width: 1.* is out of range"),
        ("data.fixed_token={positions: [1, 100000000000000000000]}", "positions: 1.* is out of range"),
        ("data.random_tokens={start: 0, end: 1000000000000000}", "position 0 is BOS"),
        ("name=2001-99-99", "the value is not valid YAML"),
        ("name=" + 5000 * "[", "the value is not valid YAML"),
        ("seed=" + 5000 * "9", "the value is not valid YAML"),
    ],
)
def test_huge_numbers_and_endless_values_are_refused_at_once(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("tiny", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model={attention.bias: k}", "dotted key, as in --set; write it nested: attention: \\{bias: ..\\}"),
        ("model.widht=3", "model.widht: unknown key; allowed here: layers, width, heads"),
        ("optim.learning_rate=3", "optim.learning_rate: unknown key; allowed here: name, lr"),
        ("steps=3", r"  steps: unknown key; .* Did you mean train\.steps\?"),
        ("model.attention.mask={kind: window, wide: 3}", "wide: unknown key; allowed here: kind, width"),
        ("model.layers=many", "model.layers: Input should be a valid integer.*'many'"),
        ("model.attention.operation=softplus", "operation: unknown kind 'softplus'; allowed here: softmax, scalable_"),
        ("optim.name=adam", "optim: unknown name 'adam'; allowed here: adamw, sgd, muon, ortho_adam"),
        ("model.heads=5", "model: width 64 is not a multiple of heads 5"),
        ("model.kv_heads=3", "model: heads 4 is not a multiple of kv_heads 3"),
        (
            "model.attention.operation={kind: differential, lambda_init: 1.5}",
            r"\n  model.attention.operation.lambda_init: Input should be less than 1",
        ),
        (
            "model.attention.bias={kind: k, value: {norm: -1}}",
            r"\n  model.attention.bias.value.norm: Input should be gr",
        ),
        ("model.attention.mask={kind: window, width: 0}", "width: .*greater than or equal to 1"),
        ("model.attention.mask={kind: prefix, length: 65}", "length 65 is above context 64: .*no targets"),
        ("metric.length=65", "metric.length 65 exceeds model.context 64: set metric.length to at most 64"),
        ("train.micro_batch=5", "batch_size 32 is not a multiple of micro_batch 5"),
        ("optim.lr=-1", "optim.lr: .*greater than 0"),
        ("lr", "expected KEY=VALUE"),
    ],
)
def test_a_wrong_recipe_names_the_field_and_what_is_allowed(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("tiny", [override])


@pytest.mark.parametrize("written", ["1", "[]", ""])
@pytest.mark.parametrize(("section", "key"), [("model", "layers=2"), ("train", "steps=5"), ("optim", "lr=0.1")])
def test_a_value_in_the_place_of_a_section_is_refused(section: str, key: str, written: str) -> None:
    with pytest.raises(InputError, match=rf"{section} must be .*a section with keys such as"):
        load_recipe("tiny", [f"{section}={written}", f"{section}.{key}"])


def test_a_value_in_the_place_of_a_kind_is_refused_with_the_kinds() -> None:
    with pytest.raises(InputError, match=r"model\.gate must be one of none, head, element, .*\(got True\)"):
        load_recipe("tiny", ["model.gate=yes"])


@pytest.mark.parametrize("text", ["model: 3", "model:", "model: []", "optim:", "model: {attention: {mask: }}"])
def test_a_section_of_a_recipe_file_that_is_a_value_or_empty_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match=r"mine\.yaml is not a valid recipe:\n  \S+ must be .*a section"):
        load_recipe(str(tmp_path / "mine.yaml"), ["model.layers=2", "optim.lr=0.1", "model.attention.mask.width=8"])


def test_a_repeated_key_of_a_recipe_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("model: {layers: 2}\nseed: 1\nmodel: {width: 32}")
    with pytest.raises(InputError, match=r"mine\.yaml is not valid YAML: the key model is repeated"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_a_recipe_file_that_is_not_yaml_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 1\ntrain:\n  steps: [1\n  seed: 2\n")
    with pytest.raises(
        InputError, match=r"mine\.yaml is not valid YAML: did not find expected ',' or '\]', line 4, column 7$"
    ):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_an_optional_section_may_be_null() -> None:
    recipe = load_recipe("tiny", ["data.random_tokens=null", "data.random_tokens={start: 1, end: 3}"])
    assert recipe.data.random_tokens is not None
    assert load_recipe("tiny", ["data.random_tokens=null"]).data.random_tokens is None
    with pytest.raises(InputError, match=r"data\.random_tokens must be a section"):
        load_recipe("tiny", ["data.random_tokens=5", "data.random_tokens.start=1", "data.random_tokens.end=3"])


def test_the_backend_sdpa_is_refused_for_operations_other_than_plain_softmax() -> None:
    with pytest.raises(InputError, match="sdpa supports plain softmax only"):
        load_recipe("tiny", ["model.attention.backend=sdpa", "model.attention.operation=sigmoid"])
    with pytest.raises(InputError, match=r"kind='softmax' alpha=2\.0"):
        load_recipe("tiny", ["model.attention.backend=sdpa", "model.attention.operation.alpha=2"])


def test_a_missing_recipe_lists_the_available_ones() -> None:
    with pytest.raises(
        InputError, match=re.escape("recipe huge not found: use a YAML file or one of 1b, 60m")
    ) as refused:
        load_recipe("huge")
    assert str(refused.value).startswith("recipe huge not found")


def test_merge_keys_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("train: &a {steps: 1}\noptim: {<<: *a}\n")
    with pytest.raises(InputError, match=r"merge keys \(<<\) are not supported: write the keys out, line 2, column 9"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "list.yaml"
    file.write_text(yaml.safe_dump([1, 2]))
    with pytest.raises(InputError, match="must contain a mapping"):
        load_recipe(str(file))
