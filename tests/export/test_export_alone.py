"""Exported models in separate processes: without sinklab, with the code beside them, and registered."""

import ast
import builtins
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from exported_models import shaken_run, some_tokens, tokenizer_in
from safetensors.torch import load_file
from sampling import one_in

import sinklab
from sinklab.export.directory import MODELING, bundled, write_directory
from sinklab.interventions import VARIANTS

WITHOUT_SINKLAB = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "sinklab":
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Refuse())
import json, pathlib, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, alone, tokens = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), torch.tensor(json.loads(sys.argv[3]))
logits = {}
for path in sorted(path for path in folder.iterdir() if path.is_dir()):
    trusted = path.name not in alone
    model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=trusted)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    with torch.no_grad():
        logits[path.name] = model(tokens).logits
        new = [model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*new), path.name
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    batch = tokenizer(["the sheep", "a cat sat on the fence"], padding=True, return_tensors="pt")
    together = tokenizer.batch_decode(model.generate(**batch, max_new_tokens=5, do_sample=False))
    each = [model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=5, do_sample=False)
            for text in ("the sheep", "a cat sat on the fence")]
    assert [text.replace(tokenizer.eos_token, "") for text in together] == [
        tokenizer.decode(ids[0]).replace(tokenizer.eos_token, "") for ids in each], path.name
save_file(logits, folder / "logits.safetensors")
"""

REGISTERED = {
    "sinklab first": "import sinklab; sinklab.register(); from transformers import AutoModelForCausalLM",
    "sinklab afterwards": "from transformers import AutoModelForCausalLM; import sinklab; sinklab.register()",
    "twice": "import sinklab; sinklab.register(); sinklab.register(); from transformers import AutoModelForCausalLM",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_in(folder)
    return folder / "tokenizer.json"


def python(code: str, *args: str, home: Path) -> str:
    environment = {**os.environ, "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ALONE = ("softmax", "sink_logit", "off_by_one")
"""Variants that transformers has itself."""


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_exported_models_load_without_sinklab_with_or_without_the_bundled_code(
    every: int, tokenizer: Path, tmp_path: Path
) -> None:
    """Compare the logits of a process that cannot import sinklab with ours."""
    folder = tmp_path
    runs = {variant: shaken_run(variant, tokenizer) for variant in (*ALONE, *list(VARIANTS)[1::every])}
    for variant, run in runs.items():
        write_directory(run, [], folder / "models" / variant)
    tokens_BT = some_tokens(length=9)
    python(
        WITHOUT_SINKLAB,
        str(folder / "models"),
        json.dumps(ALONE),
        json.dumps(tokens_BT.tolist()),
        home=folder / "home",
    )
    theirs = load_file(folder / "models" / "logits.safetensors")
    with torch.no_grad():
        for variant, run in runs.items():
            assert_close(theirs[variant], run.model(tokens_BT), what=variant)


@pytest.mark.parametrize("order", one_in(3, REGISTERED))
def test_the_auto_classes_know_the_model_in_any_order_of_imports(order: str, tokenizer: Path, tmp_path: Path) -> None:
    write_directory(shaken_run("k_biases", tokenizer), [], tmp_path / "model")
    code = f"""import sys; {REGISTERED[order]}
from transformers import AutoConfig
print(AutoConfig.from_pretrained(sys.argv[1]).hidden_size)
print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1])).__module__)"""
    assert python(code, str(tmp_path / "model"), home=tmp_path).split() == ["32", MODELING]


def test_a_model_loaded_from_its_code_file_is_measured_as_our_own(tokenizer: Path, tmp_path: Path) -> None:
    run = shaken_run("k_biases", tokenizer)
    write_directory(run, [], tmp_path / "model")
    code = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
import sinklab
assert not type(model).__module__.startswith("sinklab")
measured = sinklab.measure(model, json.loads(sys.argv[2]))
tokens = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad(), sinklab.probe(model) as watch:
    model(tokens)
layers = [[x.importance_BHT.mean(0).tolist(), x.bias_BH.mean(0).tolist()] for x in watch.layers]
print(json.dumps([measured.loss, layers]))
"""
    tokens_BT = some_tokens(length=9)
    said = python(code, str(tmp_path / "model"), json.dumps(tokens_BT.tolist()), home=tmp_path / "home")
    loss, layers = json.loads(said.splitlines()[-1])
    ours = sinklab.measure(run.model, tokens_BT)
    assert loss == pytest.approx(ours.loss, rel=1e-6)
    assert ours.importance_bias is not None
    assert_close([importance for importance, _ in layers], ours.importance)
    assert_close([bias for _, bias in layers], ours.importance_bias)


def test_the_bundle_does_not_import_sinklab_and_names_its_modules() -> None:
    code = bundled(MODELING)
    assert "from sinklab" not in code
    assert "import sinklab" not in code
    parts = [line for line in code.splitlines() if line.startswith("# sinklab.")]
    assert parts[-1] == f"# {MODELING}"
    assert len(parts) == len(set(parts))


def test_a_name_has_one_meaning_in_the_bundle_and_none_shadows_a_built_in() -> None:
    bound, imported = [], set()
    for node in ast.parse(bundled(MODELING)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound += [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            origin = node.module if isinstance(node, ast.ImportFrom) else None
            imported |= {(alias.asname or alias.name, (origin, alias.name)) for alias in node.names}
    names = bound + [name for name, _ in imported]
    assert {name for name in names if names.count(name) > 1} == set()
    assert not set(names) & set(dir(builtins))


def test_a_missing_module_cannot_be_bundled() -> None:
    with pytest.raises(ValueError, match=r"there is no module sinklab\.nowhere"):
        bundled("sinklab.nowhere")
