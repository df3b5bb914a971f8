"""Export a run as a Hugging Face model directory.

Files: model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json, README.md (model
card), and modeling_sinklab.py if transformers has no equivalent architecture. The directory is written under a
temporary name and renamed when it is complete.

modeling_sinklab.py is for users without sinklab. It contains whole modules, each after the modules that it imports,
without imports of sinklab modules. Names are not changed, so two modules must not define the same name; a test checks
this.

The architecture of transformers that is equivalent to the model, if there is one:

model                                                           architecture           loads with
the default recipe, of any size                                 LlamaForCausalLM       transformers
the default with a sink logit or off-by-one in every layer      GraniteSWAForCausalLM  transformers
the default with two kinds of layers (mask, RoPE or NoPE)       SmolLM3ForCausalLM     transformers
the default with sandwich norms, QK norm and GeGLU              Gemma3ForCausalLM      transformers
everything else                                                 SinklabForCausalLM     sinklab, or the exported code

GraniteSWA, SmolLM3 and Gemma 3 support causal and sliding-window layers; all windows must have the same width.
GraniteSWA and SmolLM3 support layers without positional embedding (NoPE). GraniteSWA supports a RoPE theta per layer;
Gemma 3 supports one theta for sliding-window layers and one for the others; SmolLM3 supports one theta.

GraniteSWA multiplies the attention output by sigmoid(lse - s), where lse is the log-sum-exp of the scores. This is
equivalent to a sink logit s. Two other architectures have sink logits but cannot be used: the feed-forward layers of
gpt-oss are mixtures of experts without SwiGLU; MiMo-V2-Flash has sink logits only in its sliding-window layers, which
have twice as many KV heads as its other layers.

Gemma 3 multiplies embeddings by the square root of the hidden size, and normalised states by 1 + w, where w is the norm
weight. The weights are converted accordingly. The default GELU of Gemma 3 is approximate; the exported config selects
the exact GELU.
"""

import ast
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as Processors
from torch import Tensor

import sinklab
from sinklab.attention.biases import BiasParameters
from sinklab.data.tokenizers import Tokenizer, load_tokenizer
from sinklab.errors import InputError, SinklabError, cause
from sinklab.files import beside, check_writable, is_full, write_json, write_text
from sinklab.model.config import ModelConfig
from sinklab.model.llama import differences, llama_sizes, llama_weights
from sinklab.model.norm import NormConfig
from sinklab.model.position import NoPosition, Rotary
from sinklab.model.transformer import Transformer
from sinklab.tables import Table, markdown, names
from sinklab.train.recipe import Recipe
from sinklab.train.run import Evaluation, TrainedRun, load_run, read_history

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CODE = "modeling_sinklab"  # name of the module with the exported code
SINK_LOGITS = ("sink_logit", "off_by_one")
BY_LAYER = {"attention.bias", "attention.mask", "position"}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}


@dataclass(frozen=True)
class Form:
    """A model converted to a transformers architecture.

    Attributes:
        config: config of the architecture.
        architecture: class name of the model.
        weights: weights by the parameter names of that class.
        is_foreign: True if transformers contains the class; if False, the model's code must be exported too.
    """

    config: "PreTrainedConfig"
    architecture: str
    weights: dict[str, Tensor]
    is_foreign: bool


def form_of(model: Transformer, tokenizer: Tokenizer) -> Form:
    """Convert a model to the first architecture in the table of the module docstring that is equivalent to it.

    The config of the architecture contains the tokenizer's BOS and EOS ids.
    """
    tokens: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    config, kinds = model.config, model.config.layer_kinds
    layers = [config.of_layer(layer) for layer in range(1, config.layers + 1)]
    other = {key for kind in kinds for key in differences(kind)}
    biases = {kind.attention.bias.kind for kind in kinds}
    masks = [layer.attention.mask for layer in layers]
    windows = {mask.width for mask in masks if mask.kind == "window"}
    rotary = [kind for kind in kinds if isinstance(kind.position, Rotary) and kind.position.share == 1]
    is_common = len(rotary) == sum(not isinstance(kind.position, NoPosition) for kind in kinds) > 0
    if not is_common or len(windows) > 1 or any(mask.kind not in ("causal", "window") for mask in masks):
        return _as_itself(model, tokens)
    if not other and len(kinds) == 1:
        from transformers import LlamaConfig

        return Form(LlamaConfig(**llama_sizes(kinds[0]), **tokens), "LlamaForCausalLM", llama_weights(model), True)
    thetas = [layer.position.theta if isinstance(layer.position, Rotary) else 0.0 for layer in layers]  # 0 for NoPE
    sizes = {
        **llama_sizes(rotary[0]),
        **tokens,
        "layer_types": ["sliding_attention" if mask.kind == "window" else "full_attention" for mask in masks],
        "sliding_window": next(iter(windows), config.context),  # must not be None; unused without windows
    }
    if other <= BY_LAYER and biases <= set(SINK_LOGITS):
        return _as_granite(model, sizes, thetas)
    if other <= BY_LAYER and biases == {"none"} and len(kinds) == 2 and len({*thetas} - {0.0}) == 1:
        return _as_smollm3(model, sizes, thetas)
    if other <= BY_LAYER | {"norm", "ffn"} and biases == {"none"} and _is_gemma(kinds):
        return _as_gemma3(model, sizes, thetas)
    return _as_itself(model, tokens)


def _is_gemma(kinds: Sequence[ModelConfig]) -> bool:
    """Return True if norms and feed-forward layers are those of Gemma 3 and all layers have RoPE.

    All layers with the same kind of mask must have the same RoPE theta.
    """
    config = kinds[0]
    norm = NormConfig(placement="sandwich", qk_norm=True, eps=config.norm.eps)
    masks = {kind.attention.mask.kind for kind in kinds}
    rotary = all(isinstance(kind.position, Rotary) for kind in kinds)
    by_mask = len(masks) == len({(kind.attention.mask.kind, kind.position) for kind in kinds})
    return rotary and by_mask and config.norm == norm and config.ffn == "geglu"


def _as_granite(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import GraniteSWAConfig

    config = GraniteSWAConfig(
        **sizes,
        attention_multiplier=1 / math.sqrt(model.config.head_width),
        layer_rope_theta=thetas,
    )
    weights = llama_weights(model)
    for i in range(model.config.layers):
        bias = model.get_submodule(f"blocks.{i}.attention.core.bias")
        assert isinstance(bias, BiasParameters)
        sinks = bias.logit_per_head(model.embedding.weight)
        assert sinks is not None
        weights[f"model.layers.{i}.self_attn.sinks"] = sinks.detach().contiguous()
    return Form(config, "GraniteSWAForCausalLM", weights, is_foreign=True)


def _as_smollm3(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import SmolLM3Config

    config = SmolLM3Config(
        **sizes,
        pad_token_id=None,  # the default id may be outside the vocabulary
        use_sliding_window="sliding_attention" in sizes["layer_types"],
        no_rope_layers=[int(theta != 0) for theta in thetas],
    )
    return Form(config, "SmolLM3ForCausalLM", llama_weights(model), is_foreign=True)


def _as_gemma3(model: Transformer, sizes: dict[str, Any], thetas: list[float]) -> Form:
    from transformers import Gemma3TextConfig

    rope = {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in zip(sizes["layer_types"], thetas, strict=True)
    }
    config = Gemma3TextConfig(
        **{key: value for key, value in sizes.items() if key not in ("mlp_bias", "rope_parameters")},
        rope_parameters=rope,
        pad_token_id=None,
        head_dim=model.config.head_width,
        query_pre_attn_scalar=model.config.head_width,
        hidden_activation="gelu",
    )
    weights = llama_weights(model)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] / math.sqrt(model.config.width)
    weights["model.norm.weight"] = weights["model.norm.weight"] - 1
    for i in range(model.config.layers):
        for ours, theirs in GEMMA_NORMS.items():
            weight = model.get_parameter(f"blocks.{i}.{ours}.weight").detach()
            weights[f"model.layers.{i}.{theirs}.weight"] = weight - 1
    return Form(config, "Gemma3ForCausalLM", weights, is_foreign=True)


def _as_itself(model: Transformer, tokens: dict[str, Any]) -> Form:
    from sinklab.model.huggingface import SinklabConfig, SinklabForCausalLM

    config = SinklabConfig(model.config.model_dump(mode="json", exclude={"init_from", "init_sha256"}), **tokens)
    config.auto_map = {
        "AutoConfig": f"{CODE}.{SinklabConfig.__name__}",
        "AutoModelForCausalLM": f"{CODE}.{SinklabForCausalLM.__name__}",
    }
    prefix = SinklabForCausalLM.base_model_prefix
    weights = {f"{prefix}.{name}": tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    return Form(config, SinklabForCausalLM.__name__, weights, is_foreign=False)


@dataclass(frozen=True)
class _Module:
    """A module of sinklab: dotted name, source, and top-level statements."""

    name: str
    text: str
    body: list[ast.stmt]

    def own_imports(self) -> list[ast.ImportFrom]:
        """Return the top-level `from .. import` statements of sinklab modules."""
        imports = [node for node in self.body if isinstance(node, ast.ImportFrom)]
        return [node for node in imports if (node.module or "").partition(".")[0] == "sinklab"]

    def other_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """Return the other top-level import statements: standard library and other packages."""
        own = self.own_imports()
        return [node for node in self.body if isinstance(node, ast.Import | ast.ImportFrom) and node not in own]


@cache
def bundled(root: str) -> str:
    """Return the source of one module that contains `root` and all sinklab modules that it imports, also indirectly.

    Args:
        root: dotted name of a sinklab module, such as sinklab.model.huggingface.

    Raises:
        ValueError: if there is no module `root`; if a module imports a function, class or constant of sinklab under an
            alias (`from .. import x as y`); or if a top-level statement, such as a function, uses `module.x` of a
            bundled module and also has a variable or parameter `x`.
    """
    modules: dict[str, _Module] = {}
    _collect(root, modules)
    known: set[str] = set()
    sections = []
    for module in modules.values():
        sections.append(f"# {module.name}\n\n{_by_itself(module, set(modules), known).strip()}\n")
        known |= {alias.asname or alias.name for node in module.other_imports() for alias in node.names}
    return "\n\n".join(sections)


def _collect(name: str, modules: dict[str, _Module]) -> None:
    """Add the module `name` to `modules`, after the sinklab modules that it imports."""
    if name in modules:
        return
    if (path := _path(name)) is None:
        raise ValueError(f"there is no module {name}")
    text = path.read_text(encoding="utf-8")
    module = _Module(name, text, ast.parse(text).body)
    for node in module.own_imports():
        assert node.module is not None
        for alias in node.names:
            inside = f"{node.module}.{alias.name}"
            if _path(inside) is None and alias.asname:
                raise ValueError(f"{name} imports {alias.name} as {alias.asname}: remove the alias")
            _collect(inside if _path(inside) is not None else node.module, modules)
    modules[name] = module


def _path(name: str) -> Path | None:
    """Return the source file of a module of sinklab; None if there is no such module."""
    place = Path(sinklab.__file__).parent.joinpath(*name.split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _by_itself(module: _Module, modules: set[str], known: set[str]) -> str:
    """Return a module's source for the bundle.

    Imports of sinklab modules are removed. Imports of other packages are removed if earlier modules import the same
    names. `module.name` is replaced by `name` if the module is bundled.

    Args:
        modules: dotted names of all bundled modules.
        known: names that earlier modules import from other packages.
    """
    aliases = {
        alias.asname or alias.name
        for node in module.own_imports()
        for alias in node.names
        if f"{node.module}.{alias.name}" in modules
    }
    lines = module.text.encode().splitlines(keepends=True)
    spans = []
    for statement in module.body:
        nodes = list(ast.walk(statement))
        local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                if node.attr in local:
                    raise ValueError(f"{module.name}: {node.attr} is also a local name, in line {node.lineno}")
                spans.append((node.lineno, node.value.col_offset, len(f"{node.value.id}.")))
    for line, start, length in sorted(spans, reverse=True):
        lines[line - 1] = lines[line - 1][:start] + lines[line - 1][start + length :]
    there = [node for node in module.other_imports() if {one.asname or one.name for one in node.names} <= known]
    for node in [*module.own_imports(), *there]:
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            lines[line - 1] = b""
    return b"".join(lines).decode()


MODELING = "sinklab.model.huggingface"


@dataclass(frozen=True)
class Exported:
    """Description of an exported run.

    Attributes:
        directory: exported model directory.
        architecture: class name of the model, in transformers or in `code`.
        code: name of the file with the model's code; None if transformers has the architecture.
        step: training step of the exported checkpoint.
        parameters: number of parameters.
    """

    directory: Path
    architecture: str
    code: str | None
    step: int
    parameters: int

    def document(self) -> dict[str, Any]:
        """Return the content as a JSON-serializable dict."""
        return {**asdict(self), "directory": str(self.directory)}


def export_run(run: Path, directory: Path, step: int | None = None) -> Exported:
    """Export a checkpoint of a run as a Hugging Face model directory, and return a description of it.

    Args:
        run: run directory; training may be in progress.
        directory: new or empty output directory.
        step: step of the checkpoint; default: the newest valid checkpoint.

    Raises:
        InputError: see `check_writable`, `load_run`, `read_history` and `load_tokenizer`; also if `directory` is not
            empty.
        SinklabError: see `load_run`; also if the output cannot be written. Partial outputs are removed.
    """
    check_writable(directory)
    try:
        if directory.is_dir() and any(directory.iterdir()):
            raise InputError(f"{directory} is not empty: choose a new directory, or move its files away")
    except OSError as error:
        raise InputError(f"{directory} cannot be used: {error.strerror}. Choose another directory") from error
    return write_directory(load_run(run, step), read_history(run / "metrics.jsonl"), directory)


def write_directory(found: TrainedRun, history: Sequence[Evaluation], directory: Path) -> Exported:
    """Write the model of a run as a Hugging Face model directory, and return a description of it.

    Args:
        found: loaded run.
        history: evaluations of the run. The model card shows the last one at or before the step of `found`, if there
            is one.
        directory: new or empty output directory.

    Raises:
        InputError: if the run's tokenizer cannot be loaded.
        SinklabError: see `atomic_directory`.
    """
    tokenizer = load_tokenizer(str(found.tokenizer_path))
    form, recipe = form_of(found.model, tokenizer), found.recipe
    with atomic_directory(directory) as aside:
        from safetensors.torch import save_file
        from transformers import GenerationConfig

        form.config.update({"architectures": [form.architecture], "dtype": "float32"})
        form.config.save_pretrained(aside)
        GenerationConfig(bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.eos_id).save_pretrained(aside)
        save_file(form.weights, aside / "model.safetensors", metadata={"format": "pt"})
        _write_tokenizer(tokenizer, aside, recipe.data.bos, recipe.model.context)
        if not form.is_foreign:
            write_code(aside)
        write_text(aside / "README.md", _model_card(recipe, found.step, history, form))
    parameters = sum(parameter.numel() for parameter in found.model.parameters())
    code = None if form.is_foreign else f"{CODE}.py"
    return Exported(directory, form.architecture, code, found.step, parameters)


def write_code(folder: Path) -> None:
    """Write modeling_sinklab.py to `folder`: SinklabForCausalLM and all sinklab modules that it imports.

    Raises:
        InputError, SinklabError: see `sinklab.files.written_aside`.
    """
    write_text(folder / f"{CODE}.py", bundled(MODELING))


@contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `directory` at the end of the `with` block; an exception removes it.

    `directory` must be new or empty; missing parent folders are created. The umask determines the permissions of the
    folder and of the files directly in it.

    Raises:
        SinklabError: if the folder cannot be created or renamed, `directory` is not empty or not a directory, or
            writing fails inside the `with` block, such as on a full disk.
    """
    target = directory.resolve()
    aside = beside(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        yield aside
        for path in aside.iterdir():
            path.chmod(aside.stat().st_mode & 0o666)  # safetensors gives its files to their owner only
        aside.replace(target)
    except Exception as error:  # safetensors, tokenizers and `write_text` raise errors other than OSError
        failure = (error.__cause__ if isinstance(error, SinklabError) else None) or error
        if not (isinstance(failure, OSError) or is_full(failure)):
            raise
        why = getattr(failure, "strerror", None) or cause(failure)
        remedy = "free some space, or choose" if is_full(failure) else "choose"
        raise SinklabError(f"cannot write {directory}: {why}; {remedy} another directory") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, bos: bool, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json; if `bos` is True, the tokenizer prepends BOS to texts."""
    processors: list[Any] = [ByteLevel(trim_offsets=False)]  # no effect; a processor is required
    if bos:
        token = tokenizer.token(tokenizer.bos_id)
        special = [(token, tokenizer.bos_id)]
        processors = [TemplateProcessing(single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=special)]
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.post_processor = Processors(processors)
    backend.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": tokenizer.token(tokenizer.eos_id),
            "bos_token": tokenizer.token(tokenizer.bos_id),
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )


def card_head(*tags: str) -> str:
    """Return the YAML metadata header of a model card; its tags are sinklab, attention-sink and `tags`."""
    listed = "".join(f"  - {tag}\n" for tag in ("sinklab", "attention-sink", *tags))
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n{listed}---\n"


def _model_card(recipe: Recipe, step: int, history: Sequence[Evaluation], form: Form) -> str:
    """Return the text of README.md: model, last evaluation at or before `step`, how to load it, and recipe."""
    metric = recipe.metric
    parts = [
        f"{card_head()}\n# {recipe.name}",
        f"A LLaMA-style language model, step {step:,} of {recipe.train.steps:,} of a training run of sinklab "
        f"{sinklab.__version__}, a laboratory for attention sinks in language models.",
    ]
    for last in [row for row in history if row.step <= step][-1:]:
        sink = f"Sink_1, percent of heads (eps {metric.eps:g}, {metric.sequences} sequences of {metric.length} tokens)"
        rows = {
            "validation loss, nats per token": (last.valid_loss, ".4f"),
            sink: (next(iter(last.sink_rate), None), ".2f"),
            "sink on the bias, percent of heads": (last.sink_rate_bias, ".2f"),
            "norm ratio of the first position, largest over blocks": (last.largest_norm_ratio, ".2f"),
            "tokens trained on": (last.tokens, ",.0f"),
        }
        cells = [(name, f"{value:{spec}}") for name, (value, spec) in rows.items() if value is not None]
        parts.append(f"## At step {last.step:,}\n\n{markdown(Table('', names('', ''), cells))}")
    own, needed = "", ""
    if not form.is_foreign:
        own = f" `{CODE}.py` is sinklab's own code in one file; it needs torch, transformers and pydantic."
        needed = (
            "\nimport sinklab\n\n"
            "sinklab.register()  # or, without sinklab, pass trust_remote_code=True to both calls, "
            f"which runs {CODE}.py"
        )
    parts.append(
        f"## Loading\n\nThe architecture is `{form.architecture}`.{own}\n\n```python\n"
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{needed}\n\n"
        "model = AutoModelForCausalLM.from_pretrained(DIR)\ntokenizer = AutoTokenizer.from_pretrained(DIR)\n```"
    )
    if changed := [name for name in ("fixed_token", "random_tokens") if getattr(recipe.data, name) is not None]:
        parts.append(
            f"Some tokens of its training sequences were replaced (`data.{'`, `data.'.join(changed)}`). The tokenizer "
            "does not replace them, so numbers measured on plain text differ from those of the run."
        )
    return "\n\n".join([*parts, f"## Recipe\n\n```yaml\n{recipe.to_yaml()}```\n"])
