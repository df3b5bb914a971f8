"""Whether a change of the code changes any number: record what every command gives before and after, and compare.

    PYTHONPATH=BEFORE/src python -m benchmarks.same_numbers record /tmp/before
    python -m benchmarks.same_numbers record /tmp/after --reports-of /tmp/before
    python -m benchmarks.same_numbers compare /tmp/before /tmp/after

Recorded are: twelve steps of every variant of the catalogue (losses, metrics, weights), a lab, TinyStories-656K and
tiny random models of many families measured in every way, the reports of all of these, and the help of every command.
Numbers are compared to the last bit, reports as bytes; what depends on the clock or the memory is left out. Both
recordings have to be made on the same machine, with one thread each. Needs SINKLAB_DATA.
"""

import argparse
import json
import multiprocessing as mp
import os
import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

DATA = Path(os.environ.get("SINKLAB_DATA", Path(__file__).parents[2] / "shared" / "data"))
COMMANDS = ("", "lab", "train", "measure", "compare", "interventions", "report", "runs", "data", "data prepare")
BASE: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 4, "ffn_width": 48, "context": 32},
    "data": {"source": "text/all.jsonl", "tokenizer": "train:300"},
    "optim": {"lr": 3e-3},
    "schedule": {"warmup_steps": 4},
    "train": {"steps": 12, "batch_size": 4, "eval_every": 4, "eval_sequences": 8, "save_every": 6, "precision": "fp32"},
    "metric": {"sequences": 16, "length": 32, "eps": 0.1},
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # sharp attention, so that some alphas lie above eps
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", GROUPED),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", GROUPED),
    "gemma2": (
        "Gemma2Config",
        GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": ("GptOssConfig", GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
    ),
    "falcon": (
        "FalconConfig",
        {k: SMALL[k] for k in SMALL if k != "intermediate_size"},
    ),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "jamba": (
        "JambaConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_d_conv": 2,
            "mamba_dt_rank": 4,
        },
    ),
}


def record(out: Path, reports_of: Path | None, jobs: int, only: str) -> None:
    """Run every command whose name begins with `only` into `out`, with paths relative to it."""
    reports_of = (reports_of or out).resolve()
    out.mkdir(parents=True)
    os.chdir(out)
    os.environ.update(SINKLAB_CACHE="cache", OMP_NUM_THREADS="1", COLUMNS="120")
    _write_texts()
    with _pool(jobs) as pool:
        list(pool.map(_write_model, FAMILIES))
        helps = {f"help/{name.replace(' ', '_') or 'all'}": [*name.split(), "--help"] for name in COMMANDS}
        data = {"data": ["data", "prepare", "text/all.jsonl", "--tokenizer", "train:300", "--out", "tokens"]}
        runs = _trainings()
        first = {"train/softmax": runs.pop("train/softmax")}  # the text is prepared once
        for stage in (
            lambda: helps | data | first,
            lambda: runs | _measurements(),
            _of_runs,
            lambda: _reports(reports_of),
        ):
            _run_all(pool, {name: arguments for name, arguments in stage().items() if name.startswith(only)})


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn"))


def _run_all(pool: ProcessPoolExecutor, commands: dict[str, list[str]]) -> None:
    for done, name in enumerate(pool.map(_run, commands.items()), 1):
        print(f"{done}/{len(commands)} {name}", flush=True)


def _run(named: tuple[str, list[str]]) -> str:
    """One command in a fork of this process; its status and standard output are kept."""
    name, arguments = named
    log = Path("log") / name
    log.parent.mkdir(parents=True, exist_ok=True)
    import sinklab.commands.app as cli

    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        for number, ending in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(log.with_name(log.name + ending), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = ["sinklab", *arguments]
        try:
            cli.main()
        except SystemExit as leaving:
            sys.stdout.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else bool(leaving.code))
        os._exit(99)
    _, status = os.waitpid(child, 0)
    log.with_name(log.name + ".status").write_text(f"{os.waitstatus_to_exitcode(status)}\n")
    return name


def _write_texts() -> None:
    Path("text/domains").mkdir(parents=True)
    every = []
    for name in ("wikitext_2", "github_code", "shakespeare"):
        lines = (DATA / "domains" / f"{name}.jsonl").read_text("utf-8").splitlines()
        Path(f"text/domains/{name}.jsonl").write_text("\n".join(lines[:40]) + "\n", "utf-8")
        every += lines
    few = [line for place, line in enumerate(every) if place % 10 == 0]
    Path("text/all.jsonl").write_text("\n".join(few) + "\n", "utf-8")
    Path("text/more.jsonl").write_text("\n".join(every) + "\n", "utf-8")
    chats = (DATA / "chat" / "messages.jsonl").read_text("utf-8").splitlines()[:20]
    Path("text/chat.jsonl").write_text("\n".join(chats) + "\n", "utf-8")
    for file in Path("text").rglob("*.jsonl"):
        os.utime(file, (0, 0))  # by which a text is known again


def _write_model(name: str) -> None:
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(Path("text/all.jsonl").read_text("utf-8").splitlines(), words)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    kind, values = FAMILIES[name]
    config = getattr(hf, kind)(**values, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(f"models/{name}")
    tokenizer.save_pretrained(f"models/{name}")


def _trainings() -> dict[str, list[str]]:
    from sinklab.interventions.variants import VARIANTS
    from sinklab.train.recipe import build_recipe

    Path("recipes").mkdir()
    for name, variant in VARIANTS.items():
        recipe = build_recipe({**BASE, "name": name}, variant.overlay).model_dump(mode="json")
        Path(f"recipes/{name}.yaml").write_text(yaml.safe_dump(recipe), "utf-8")
    trainings = {f"train/{name}": ["train", f"recipes/{name}.yaml", "--out", f"train/{name}"] for name in VARIANTS}
    lab = ["lab", "--steps", "20", "--seeds", "2", "--text", "text/more.jsonl", "--out", "lab"]
    return {**trainings, "lab": lab}


def _measurements() -> dict[str, list[str]]:
    stories, few = str(DATA / "models" / "TinyStories-656K"), ["--sequences", "24"]
    natural = ["--text", "text/all.jsonl", *few]
    asked: dict[str, list[str]] = {
        "natural": [stories, *natural],
        "random": [stories, "--inputs", "random", *few],
        "repeat": [stories, "--inputs", "repeat", *few],
        "no_bos": [stories, *natural, "--no-bos"],
        "eps": [stories, *natural, "--eps", "0.1,0.2", "--eps", "0.4"],
        "lengths": [stories, *natural, "--lengths", "16", "--lengths", "32", "--eps", "0.2,0.3"],
        "details": [stories, *natural, "--details", "--format", "csv"],
        "map": [stories, *natural, "--map", "1.1", "--map", "2.2"],
        "no_loss": [stories, *natural, "--no-loss", "--dtype", "float32"],
        "bfloat16": [stories, *natural, "--dtype", "bfloat16", "--batch-size", "5"],
        "ablate": [stories, *natural, "--ablate", "mask_first:1", "--ablate", "no_bos", "--ablate", "zero_massive"],
        "swap": ["models/gpt2", *natural, "--swap-position", "1", "3"],
        "replace": ["models/gpt2", *natural, "--replace-position", "2", "1"],
        "chat": ["models/llama", "--text", "text/chat.jsonl", "--sequences", "10"],
        "domains": [stories, "--text", "text/domains", *few, "--by-domain"],
        "json": [stories, *natural, "--json"],
    }
    commands = {f"measure/{name}": ["measure", *rest, "--out", f"measure/{name}"] for name, rest in asked.items()}
    every = ["--text", "text/all.jsonl", "--sequences", "10", "--length", "24", "--eps", "0.1"]
    for name in FAMILIES:
        for way, how in {"plain": [], "details": ["--details", "--map", "1.2"], "short": ["--lengths", "7"]}.items():
            place = f"families/{name}_{way}"
            commands[place] = ["measure", f"models/{name}", *every, *how, "--out", place]
        ablate = ["--ablate", "mask_first:1", "--ablate", "zero_massive"]
        commands[f"families/{name}_ablate"] = ["measure", f"models/{name}", *every, *ablate]
        commands[f"families/{name}_repeat"] = ["measure", f"models/{name}", "--inputs", "repeat", "--sequences", "10"]
    models = ["models/llama", stories, "models/gpt2"]
    commands["compare/text"] = ["compare", *models, "--text", "text/all.jsonl", *few, "--out", "compare/text"]
    chat = ["--text", "text/chat.jsonl", "--sequences", "8"]
    commands["compare/chat"] = ["compare", "models/llama", "models/gpt2", *chat, "--out", "compare/chat"]
    commands["sizes"] = ["measure", "--family", "all", "--dry-run", "--json"]
    commands["interventions"] = ["interventions"]
    commands["interventions_json"] = ["interventions", "--json"]
    commands["plan"] = ["train", "60m", "--dry-run", "--json"]
    refused = {
        "no_model": ["measure"],
        "no_text": ["measure", stories],
        "absent_text": ["measure", stories, "--text", "text/nothing.txt"],
        "eps_word": ["measure", stories, "--text", "text/all.jsonl", "--eps", "x"],
        "absent_model": ["measure", "./nothing", "--text", "text/all.jsonl"],
        "bad_key": ["train", "tiny", "--set", "model.nothing=1"],
        "bad_ablation": ["measure", stories, "--text", "text/all.jsonl", "--ablate", "everything"],
        "map_beyond": ["measure", stories, "--text", "text/all.jsonl", "--map", "9.1"],
        "two_models": ["measure", stories, "--family", "gpt2"],
        "empty_report": ["report", "text"],
    }
    return {**commands, **{f"refused/{name}": rest for name, rest in refused.items()}}


def _of_runs() -> dict[str, list[str]]:
    commands = {}
    for name in ("softmax", "k_biases", "sigmoid", "sink_token", "window", "prefix", "differential", "elu_kernel"):
        natural = ["measure", f"train/{name}", "--text", "text/all.jsonl", "--sequences", "12", "--length", "24"]
        commands[f"of_runs/{name}"] = [*natural, "--details", "--map", "1.1", "--out", f"of_runs/{name}"]
        commands[f"of_runs/{name}_lengths"] = [*natural, "--lengths", "7", "--eps", "0.1,0.2"]
    ablate = ["--ablate", "mask_first:1", "--ablate", "zero_massive", "--inputs", "random", "--length", "24"]
    commands["of_runs/ablate"] = ["measure", "train/softmax", *ablate, "--out", "of_runs/ablate"]
    short = ["--length", "24"]
    commands["of_runs/repeat"] = ["measure", "train/softmax", "--inputs", "repeat", *short, "--out", "of_runs/repeat"]
    pair = ["compare", "train/softmax", "train/sigmoid", "--inputs", "random", *short]
    commands["of_pairs/runs"] = [*pair, "--out", "of_pairs/runs"]
    commands["runs"] = ["runs", "train", "lab", "--json"]
    return commands


def _reports(source: Path) -> dict[str, list[str]]:
    """The reports of results that an earlier recording holds, so that not even a clock can differ."""
    commands = {}
    for name in ("train", "lab", "measure", "families", "compare", "of_runs"):
        place = Path("drawn") / name
        if not (source / name).is_dir():
            continue
        shutil.copytree(source / name, place, ignore=shutil.ignore_patterns("report.html", "checkpoints"))
        inside = sorted(str(one) for one in place.iterdir() if one.is_dir())
        if name == "lab":
            inside = [str(place)]
        page = f"drawn/{name}.html"
        commands[f"report/{name}"] = ["report", *inside, "--out", page]
        for one in inside if name in ("measure", "compare", "of_runs") else ():
            commands[f"report/{name}/{Path(one).name}"] = ["report", one]
    return commands


CLOCK = re.compile(
    r"(seconds|tokens_per_second|peak_memory|memory_mb|stall|time|mfu|speed|created|version|git|hours|host|per_second)"
    r"|^(files|text|identity)$"  # when they were written
)
DURATION = re.compile(
    r"waited for data \d+%|\b\d[\d,.]*\s?(s|ms|min|MB|GB|tokens/s|h|it/s)\b|\d+:\d\d(:\d\d)?( UTC)?|\d{4}-\d\d-\d\d"
)


LEFT_OUT = ("lock", "SHA256SUMS", "lab.err", "lab.out")  # name a process, or are in an order that is left open


def compare(before: Path, after: Path, common: bool) -> int:
    """Print every difference; the number of files that differ. What only one of two commands was asked for counts."""
    differences = 0
    names = {path.relative_to(root) for root in (before, after) for path in root.rglob("*") if path.is_file()}
    counted = 0
    for name in sorted(names):
        if name.parts[0] == "cache" or name.name.startswith((".", "events.out")) or name.name in LEFT_OUT:
            continue
        absent = [root for root in (before, after) if not (root / name).is_file()]
        if absent and common:
            continue
        counted += 1
        found = [f"absent in {absent[0]}"] if absent else list(_differences(before / name, after / name))
        for one in found[:5]:
            print(f"{name}: {one}")
        differences += bool(found)
    print(f"{counted} files compared, {differences} differ")
    return differences


def _differences(one: Path, other: Path) -> Iterator[str]:
    match one.suffix:
        case ".json":
            yield from _unequal(json.loads(one.read_text("utf-8")), json.loads(other.read_text("utf-8")), "")
        case ".jsonl":
            pairs = [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in (one, other)]
            yield from _unequal(pairs[0], pairs[1], "")
        case ".npz":
            with np.load(one) as first, np.load(other) as second:
                for key in sorted({*first.files, *second.files}):
                    if key not in first.files or key not in second.files:
                        yield f"{key} is in one only"
                    elif first[key].dtype != second[key].dtype or first[key].tobytes() != second[key].tobytes():
                        yield f"{key} differs"
        case ".safetensors":
            first, second = load_file(one), load_file(other)
            yield from (key for key in sorted({*first, *second}) if not _same_tensor(first.get(key), second.get(key)))
        case ".html" if "drawn" not in one.parts:
            return  # drawn from results with other times
        case ".out" | ".err" | ".md" | ".yaml" | ".html":
            first, second = _lines(one), _lines(other)
            if first[:1] == ["{"] or first[:1] == ["["]:
                yield from _unequal(json.loads(one.read_text("utf-8")), json.loads(other.read_text("utf-8")), "")
            elif first != second:
                pairs = [(a, b) for a, b in zip(first, second, strict=False) if a != b]
                yield f"{pairs[0][0]!r} / {pairs[0][1]!r}" if pairs else f"{len(first)} / {len(second)} lines"
        case _:
            if one.read_bytes() != other.read_bytes():
                yield "bytes differ"


def _lines(path: Path) -> list[str]:
    """Of a text, without what the clock says and what transformers does."""
    lines = path.read_text("utf-8").splitlines()
    return [DURATION.sub("#", line) for line in lines if not line.startswith("[transformers]")]


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _unequal(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if CLOCK.search(str(key)):
                continue
            if key not in one or key not in other:
                yield f"{where}.{key} is in one only"
            else:
                yield from _unequal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _unequal(a, b, f"{where}[{index}]")
    elif one != other and not (one != one and other != other):
        yield f"{where}: {one!r} / {other!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    doing = parser.add_subparsers(dest="doing", required=True)
    recording = doing.add_parser("record", help="run every command")
    recording.add_argument("out", type=Path)
    recording.add_argument("--reports-of", type=Path, help="draw the reports of this recording's results")
    recording.add_argument("--jobs", type=int, default=2)
    recording.add_argument("--only", default="", help="commands whose name begins so: train, measure, report/lab, ..")
    comparing = doing.add_parser("compare", help="two recordings; status 1 where they differ")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--common", action="store_true", help="only what is in both (after --only)")
    options = parser.parse_args()
    if options.doing == "record":
        record(options.out, options.reports_of, options.jobs, options.only)
    elif compare(options.before, options.after, options.common):
        sys.exit(1)


if __name__ == "__main__":
    main()
