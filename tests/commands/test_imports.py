"""Imports: `import sinklab` is light, and training needs no libraries of reports and extras."""

import subprocess
import sys

EXTRAS = {"altair", "vl_convert", "datasets", "ray", "submitit", "trl", "lm_eval", "wandb", "tensorboard"}
HEAVY = ["torch", "transformers", "scipy", *EXTRAS]

TRAIN_WITHOUT = f"""
REFUSED = {EXTRAS | {"transformers", "scipy"}}
"""
TRAIN_WITHOUT += """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError(f"{name} was imported on a training path")
sys.meta_path.insert(0, Refuse())
import json, pathlib, tempfile
from sinklab.train.recipe import build_recipe
from sinklab.data.prepare import prepare, settings_of
from sinklab.train.loop import Trainer
from sinklab.train.run import open_run
folder = pathlib.Path(tempfile.mkdtemp())
text = folder / "text.jsonl"
text.write_text("".join(json.dumps({"text": f"word {i} and {i * i} " * 9}) + "\\n" for i in range(200)))
data = prepare(settings_of(str(text), "train:300", valid_fraction=0.3), folder / "tokens")
recipe = build_recipe({
    "model": {"layers": 1, "width": 16, "heads": 2, "ffn_width": 16, "context": 16},
    "train": {"steps": 2, "batch_size": 2, "eval_sequences": 4}, "metric": {"length": 16, "sequences": 4},
})
print(Trainer(open_run(recipe, data, folder / "run")).train().status)
"""


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_sinklab_loads_no_heavy_library() -> None:
    code = f"import sys, sinklab, sinklab.commands.app; print([m for m in {HEAVY} if m in sys.modules])"
    assert python(code) == "[]"


def test_an_unknown_ablation_is_refused_before_torch_is_loaded() -> None:
    code = "import sys; from sinklab.commands import app; sys.argv[1:] = ['measure', 'm', '--ablate', 'mask_frist:1']"
    code += "\ntry: app.main()\nexcept SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2 False"
    assert "the ablation 'mask_frist:1' is unknown: use mask_first:N" in " ".join(done.stderr.split())


def test_training_works_without_report_libraries_and_extras() -> None:
    assert python(TRAIN_WITHOUT) == "done"
