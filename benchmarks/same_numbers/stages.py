"""Recorded commands, in stages.

A stage is a function that returns the arguments of commands by name. It is called after all earlier stages have run.
The arguments ["python", CASE] run a case of `library.py`.
"""

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks.same_numbers.inputs import DATA, FAMILIES, RESULTS

Commands = dict[str, list[str]]
HELP = (
    *("", "lab", "train", "measure", "compare", "assess", "eval", "export", "sft", "experiments"),
    *("reproduce", "verify", "interventions", "report", "runs", "data", "data prepare"),
)
BASE: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "context": 32},
    "data": {"source": "text/all.jsonl", "tokenizer": "train:300"},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 12, "batch_size": 4, "eval_every": 4, "eval_sequences": 8, "save_every": 6, "precision": "fp32"},
    "metric": {"sequences": 16, "length": 32, "eps": 0.1},
}
STORIES, FEW = str(DATA / "models" / "TinyStories-656K"), ["--sequences", "24"]
NATURAL = ["--text", "text/all.jsonl", *FEW]
ON_REQUEST = "kv_cache,pruning,budgets"
MEASURED_RUNS = ("softmax", "k_biases", "sigmoid", "sink_token", "window", "prefix", "differential", "elu_kernel")
GATED_RUNS = ("gate_head", "gate_element", "gate_value", "v_scale")
ASSESSED_RUNS = (
    *("softmax", "bos", "multi_query", "position_learnable", "position_t5", "position_alibi", "position_relative"),
    *("mla", "mla_compressed", "mla_sink_logit", "linear_hybrid", "gate_head", "exclusive", "value_residual"),
    *("qk_norm", "head_norm", "heads_summed", "forgetting", "stick_breaking", "stick_breaking_rest_learned"),
    *("sigmoid", "sigmoid_normalised", "elu1", "elu_kernel", "differential", "scalable_softmax", "softpick", "softcap"),
    *("clipped_softmax", "elastic_softmax", "sink_token", "registers", "k_biases", "k_biases_shared"),
    *("k_biases_fixed_first", "kv_biases", "kv_biases_shared", "v_biases", "sink_logit", "off_by_one"),
    *("window", "prefix", "document"),
)
EXPORTED_RUNS = (
    *("softmax", "sink_logit", "k_biases", "kv_biases", "mla", "sigmoid", "position_t5", "position_alibi", "window"),
    *("stick_breaking", "forgetting", "differential", "elu_kernel", "linear_hybrid", "registers", "sink_token"),
)
COPIED = ("train", "lab", "export", "reproduce")
"""Folders of an earlier recording that are copied for `record --only`, because later stages read them."""


def first() -> Commands:
    """Help, `data prepare`, and one training, which prepares the text for all others."""
    helps = {f"help/{name.replace(' ', '_') or 'all'}": [*name.split(), "--help"] for name in HELP}
    data = {"data": ["data", "prepare", "text/all.jsonl", "--tokenizer", "train:300", "--out", "tokens"]}
    return helps | data | {"train/softmax": trainings()["train/softmax"]}


def trainings() -> Commands:
    """Trainings of twelve steps of every variant in the catalogue, and `lab`; writes the recipes of the variants."""
    from sinklab.interventions import VARIANTS
    from sinklab.train.recipe import build_recipe

    Path("recipes").mkdir(exist_ok=True)
    for name, variant in VARIANTS.items():
        recipe = build_recipe({**BASE, "name": name}, variant.overlay).model_dump(mode="json")
        Path(f"recipes/{name}.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    found = {f"train/{name}": ["train", f"recipes/{name}.yaml", "--out", f"train/{name}"] for name in VARIANTS}
    found["lab"] = ["lab", "--steps", "20", "--seeds", "2", "--text", "text/more.jsonl", "--out", "lab"]
    return found


def measurements() -> Commands:
    """Measurements of existing models with all options, commands without a run, and commands that raise an error."""
    asked = {
        "natural": [STORIES, *NATURAL],
        "random": [STORIES, "--inputs", "random", *FEW],
        "repeat": [STORIES, "--inputs", "repeat", *FEW],
        "no_bos": [STORIES, *NATURAL, "--no-bos"],
        "eps": [STORIES, *NATURAL, "--eps", "0.1,0.2", "--eps", "0.4"],
        "lengths": [STORIES, *NATURAL, "--lengths", "16", "--lengths", "32", "--eps", "0.2,0.3"],
        "details": [STORIES, *NATURAL, "--details", "--format", "csv"],
        "explore": [STORIES, *NATURAL, "--explore"],
        "gradients": [STORIES, *NATURAL, "--gradients"],
        "map": [STORIES, *NATURAL, "--map", "1.1", "--map", "2.2"],
        "no_loss": [STORIES, *NATURAL, "--no-loss", "--dtype", "float32"],
        "bfloat16": [STORIES, *NATURAL, "--dtype", "bfloat16", "--batch-size", "5"],
        "ablate": [STORIES, *NATURAL, "--ablate", "mask_first:1", "--ablate", "no_bos", "--ablate", "zero_massive"],
        "perturb": [STORIES, *NATURAL, "--perturb", "3"],
        "swap": ["models/gpt2", *NATURAL, "--swap-position", "1", "3"],
        "replace": ["models/gpt2", *NATURAL, "--replace-position", "2", "1"],
        "chat": ["models/llama", "--text", "text/chat.jsonl", "--sequences", "10"],
        "domains": [STORIES, "--text", "text/domains", *FEW, "--by-domain"],
        "json": [STORIES, *NATURAL, "--json"],
    }
    commands = {f"measure/{name}": ["measure", *rest, "--out", f"measure/{name}"] for name, rest in asked.items()}
    every = ["--text", "text/all.jsonl", "--sequences", "10", "--length", "24", "--eps", "0.1"]
    ways = {
        "plain": [],
        "details": ["--details", "--map", "1.2"],
        "short": ["--lengths", "7"],
        "perturb": ["--perturb", "4"],
        "gradients": ["--gradients"],
    }
    for name in FAMILIES:
        for way, how in ways.items():
            place = f"families/{name}_{way}"
            commands[place] = ["measure", f"models/{name}", *every, *how, "--out", place]
        ablate = ["--ablate", "mask_first:1", "--ablate", "zero_massive"]
        commands[f"families/{name}_ablate"] = ["measure", f"models/{name}", *every, *ablate]
        commands[f"families/{name}_repeat"] = ["measure", f"models/{name}", "--inputs", "repeat", "--sequences", "10"]
    models = ["models/llama", STORIES, "models/gpt2"]
    commands["compare/text"] = ["compare", *models, *NATURAL, "--out", "compare/text"]
    chat = ["--text", "text/chat.jsonl", "--sequences", "8"]
    commands["compare/chat"] = ["compare", "models/llama", "models/gpt2", *chat, "--out", "compare/chat"]
    commands["interventions"] = ["interventions"]
    commands["interventions_json"] = ["interventions", "--json"]
    commands["plan"] = ["train", "60m", "--dry-run", "--json"]
    commands["coverage"] = ["experiments", "--coverage", "--json"]
    natural = ["--text", "text/all.jsonl"]
    refused = {
        "no_model": ["measure"],
        "no_text": ["measure", STORIES],
        "absent_text": ["measure", STORIES, "--text", "text/nothing.txt"],
        "eps_word": ["measure", STORIES, *natural, "--eps", "x"],
        "absent_model": ["measure", "./nothing", *natural],
        "bad_key": ["train", "tiny", "--set", "model.nothing=1"],
        "bad_ablation": ["measure", STORIES, *natural, "--ablate", "everything"],
        "map_beyond": ["measure", STORIES, *natural, "--map", "9.1"],
        "empty_report": ["report", "text"],
        "bad_part": ["assess", "models/llama", *natural, "--parts", "everything"],
        "positions_in_cache": ["assess", "models/gpt2", *natural, "--parts", "streaming", "--positions", "cache"],
        "no_run": ["export", "models/llama", "export/nothing"],
        "measured_without_model": ["reproduce", "table_1"],
        "unknown_experiment": ["reproduce", "table_99"],
    }
    return commands | {f"refused/{name}": rest for name, rest in refused.items()}


def of_runs() -> Commands:
    """Measurements, comparisons, exports and a replay of runs."""
    commands: Commands = {}
    short, natural = ["--length", "24"], ["--text", "text/all.jsonl", "--sequences", "12", "--length", "24"]
    for name in GATED_RUNS:
        commands[f"of_runs/{name}"] = ["measure", f"train/{name}", *natural, "--details", "--out", f"of_runs/{name}"]
    for name in MEASURED_RUNS:
        run = ["measure", f"train/{name}", *natural]
        commands[f"of_runs/{name}_gradients"] = [*run, "--gradients", "--json"]
        commands[f"of_runs/{name}"] = [*run, "--details", "--map", "1.1", "--out", f"of_runs/{name}"]
        commands[f"of_runs/{name}_lengths"] = [*run, "--lengths", "7", "--eps", "0.1,0.2"]
        commands[f"of_runs/{name}_perturb"] = [*run, "--perturb", "3", "--ablate", "mask_first:2", "--json"]
    ablate = ["--ablate", "mask_first:1", "--ablate", "zero_massive", "--inputs", "random", *short]
    commands["of_runs/ablate"] = ["measure", "train/softmax", *ablate, "--out", "of_runs/ablate"]
    commands["of_runs/repeat"] = ["measure", "train/softmax", "--inputs", "repeat", *short, "--out", "of_runs/repeat"]
    commands["of_runs/checkpoints"] = ["measure", "train/softmax", *natural, "--by-checkpoint", "--json"]
    commands["of_pairs/runs"] = ["compare", "train/softmax", "train/sigmoid", "--inputs", "random", *short]
    commands["of_pairs/runs"] += ["--out", "of_pairs/runs"]
    commands["runs"] = ["runs", "train", "lab", "--json"]
    commands["replay"] = ["train", "recipes/softmax.yaml", "--out", "train/softmax", "--replay", "7", "--json"]
    for name in EXPORTED_RUNS:
        commands[f"export/{name}"] = ["export", f"train/{name}", f"export/{name}", "--json"]
    return commands


def assessments() -> Commands:
    """Assessments of runs and of other models, with every part of `assess`."""
    few = ["--sequences", "2", "--length", "24", "--stream-length", "48", "--cache", "8", "--keep", "0", "--keep", "2"]
    few += ["--budget", "6"]
    natural = ["--text", "text/more.jsonl", *few]
    commands = {name: ["assess", f"train/{name}", *natural] for name in ASSESSED_RUNS}
    commands["position_learnable"] += ["--stream-length", "32"]
    commands |= {f"of_{name}": ["assess", f"models/{name}", *natural] for name in FAMILIES}
    commands |= {
        "validated": ["assess", "train/k_biases", *few, "--sink-tokens", "2", "--seed", "3"],
        "in_text": ["assess", "train/softmax", *natural, "--parts", "streaming", "--positions", "text"],
        "bfloat16": ["assess", STORIES, *natural, "--dtype", "bfloat16", "--parts", "quantisation,eviction"],
        "quick": ["assess", "train/softmax", "--quick"],
        "requested": ["assess", "train/softmax", *natural, "--parts", ON_REQUEST],
        "requested_llama": ["assess", "models/llama", *natural, "--parts", ON_REQUEST],
        "residual": ["assess", STORIES, *natural, "--length", "48", "--parts", "kv_cache", "--residual", "32"],
        "random_keys": ["assess", "models/gpt_oss", *natural, "--parts", "key_ablations,heads", "--sink-tokens", "2"],
        "stories": ["assess", STORIES, *natural, "--parts", "streaming,quantisation,heads"],
    }
    return {f"assess/{name}": [*rest, "--out", f"assess/{name}"] for name, rest in commands.items()}


def experiments() -> Commands:
    """Small sweeps, experiments on existing models, and `verify` and `report` of the committed results."""
    commands: Commands = {}
    for name in ("two_seeds", "five_seeds", "grid"):
        out = f"reproduce/{name}"
        commands[out] = ["reproduce", f"experiments/{name}.yaml", "--jobs", "1", "--out", out, "--json"]
    text, small = ["--text", "text/more.jsonl"], ["--seeds", "2"]
    pair = ["--model", "models/llama", "--model", "models/gpt2"]
    for name in ("gpt2", "llama"):
        commands[f"measured/ways_{name}"] = ["reproduce", "experiments/ways.yaml", "--model", f"models/{name}", *text]
    commands["measured/figure_19"] = ["reproduce", "figure_19", *pair, *text, *small]
    commands["measured/figure_2"] = ["reproduce", "figure_2", "--model", STORIES, *text, *small]
    for name, model in (("propositions", "llama"), ("propositions", "gpt2")):
        commands[f"measured/{name}_{model}"] = ["reproduce", name, "--model", f"models/{model}", *text, *small]
    for name, rest in commands.items():
        if name.startswith("measured/"):
            rest += ["--out", name, "--json"]
    commands["measured/preview"] = ["reproduce", "table_1", "--model", STORIES, *text, "--dry-run", "--json"]
    for name in ("tiny", "exploratory", "continued"):
        packed = next(path for path in (RESULTS / name, RESULTS / "archive" / name) if path.is_dir())
        shutil.copytree(packed, f"committed/{name}", dirs_exist_ok=True)
        commands[f"verify/{name}"] = ["verify", f"committed/{name}", "--json"]
        commands[f"report/committed/{name}"] = ["report", f"committed/{name}", "--out", f"drawn/committed_{name}.html"]
    commands["pack"] = ["report", "reproduce/two_seeds", "--pack", "packed", "--out", "page/packed.html"]
    return commands


def last() -> Commands:
    """Cases of `library.py`, measured exports, `verify` with retraining, and `eval` and `sft` if they are installed."""
    from benchmarks.same_numbers.library import CASES

    natural = ["--text", "text/all.jsonl", "--sequences", "10", "--length", "24", "--eps", "0.1"]
    commands = {f"python/{name}": ["python", name] for name in CASES}
    for name in EXPORTED_RUNS:
        rest = ["measure", f"export/{name}", *natural, "--details", "--perturb", "3", "--out", f"of_exports/{name}"]
        commands[f"of_exports/{name}"] = rest
    for name in ("softmax", "sink_logit"):
        rest = ["assess", f"export/{name}", "--text", "text/more.jsonl", "--sequences", "2", "--length", "16"]
        commands[f"assess/export_{name}"] = [*rest, "--stream-length", "32", "--out", f"assess/export_{name}"]
    commands["verify/retrained"] = ["verify", "packed", "--retrain", "1", "--json"]
    if _installed("eval", "lm_eval", "accelerate"):
        hellaswag = ["--tasks", "hellaswag", "--limit", "6", "--data", str(DATA / "eval" / "hellaswag_val.jsonl.gz")]
        for name in (STORIES, "models/llama"):  # the items are longer than the context of models/llama
            place = f"eval/{Path(name).name}"
            commands[place] = ["eval", name, *hellaswag, "--out", place, "--json"]
    if _installed("sft", "trl", "accelerate"):
        chats = ["--data", "text/chat.jsonl", "--steps", "4", "--batch-size", "2", "--length", "128", "--held-out", "4"]
        chats += ["--eval-every", "2", "--save-every", "2", "--sequences", "4", "--sink-length", "16"]
        tuned = ["reproduce", "experiments/tuned.yaml", "--data", "text/chat.jsonl", "--jobs", "1"]
        commands["reproduce/tuned"] = [*tuned, "--out", "reproduce/tuned", "--json"]
        for name in (STORIES, "models/llama"):  # 128 tokens exceed the context of models/llama
            place = f"sft/{Path(name).name}"
            commands[place] = ["sft", name, *chats, "--out", place, "--json"]
    return commands


def _installed(name: str, *packages: str) -> bool:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        print(f"left out: {name} ({', '.join(missing)} not installed)", flush=True)
    return not missing


def reports(earlier: Path) -> Commands:
    """Reports of the results in an earlier recording, so that times in the reports are the same too."""
    commands: Commands = {}
    for name in ("train", "lab", "measure", "families", "compare", "of_runs", "assess", "reproduce", "measured"):
        place = Path("drawn") / name
        if not (earlier / name).is_dir():
            continue
        shutil.copytree(earlier / name, place, ignore=shutil.ignore_patterns("report.html", "checkpoints"))
        inside = sorted(str(one) for one in place.iterdir() if one.is_dir())
        if name in ("lab", "reproduce", "measured"):
            commands |= {f"report/{name}/{Path(one).name}": ["report", one] for one in inside if name != "lab"}
            inside = [str(place)]
        if name != "measured":
            commands[f"report/{name}"] = ["report", *inside, "--out", f"drawn/{name}.html"]
        for one in inside if name in ("measure", "compare", "of_runs") else ():
            commands[f"report/{name}/{Path(one).name}"] = ["report", one]
    return commands


def stages(earlier: Path) -> list[Callable[[], Commands]]:
    """Return all stages in order; `earlier` is the recording whose results the reports show."""
    return [
        first,
        lambda: {name: rest for name, rest in trainings().items() if name != "train/softmax"} | measurements(),
        lambda: of_runs() | assessments() | experiments(),
        last,
        lambda: reports(earlier),
    ]
