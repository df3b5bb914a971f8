"""Presses of kvpress in `prompt_cache`: the losses of a cache that is read token by token, as kvpress reads it.

The tests of kvpress itself run where it can be imported: `pip install --no-deps kvpress==0.5.5 cachetools datasets ..`,
as kvpress 0.5.5 asks for an earlier transformers, but runs with that of sinklab.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from assessed import part_settings, small, some_tokens
from families import GROUPED
from torch import Tensor

import sinklab
from sinklab.assessing.cache_policies import KeyBudget, pyramid
from sinklab.assessing.parts.caches import PromptCache
from sinklab.assessing.reading import PartInput
from sinklab.errors import InputError

PROMPT = 16


class Recent:
    """A press that keeps the most recent keys, by forward hooks with the arguments that kvpress reads."""

    def __init__(self, keys: int) -> None:
        self.keys = keys

    def __repr__(self) -> str:
        return f"Recent({self.keys})"

    def score(self, module: Any, hidden_states: Any, keys: Tensor, *others: Any) -> Tensor:
        return torch.arange(keys.shape[2], dtype=keys.dtype).expand(keys.shape[:3])

    def removed(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        assert kwargs["cache_position"].tolist() == list(range(PROMPT))
        score = self.score(module, kwargs["hidden_states"], layer.keys, layer.values, output[1], kwargs)
        kept = score.topk(self.keys, -1).indices[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, kept), layer.values.gather(2, kept)

    @contextmanager
    def __call__(self, model: Any) -> Iterator[None]:
        hooks = [one.self_attn.register_forward_hook(self.removed, with_kwargs=True) for one in model.model.layers]
        yield
        for hook in hooks:
            hook.remove()


class HiddenFirst(Recent):
    """Hides the first key of the first KV head in place of removing it; has no scores."""

    score = None  # type: ignore[assignment]

    def removed(self, module: Any, _: Any, kwargs: dict[str, Any], output: Any) -> None:
        module.masked_key_indices = tuple(torch.zeros(3, 1, dtype=torch.long))


def model(config: Any = hf.LlamaConfig) -> Any:
    torch.manual_seed(3)
    found = hf.AutoModelForCausalLM.from_config(config(**GROUPED)).double().eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return found


def tokens(sequences: int = 2) -> Tensor:
    return some_tokens(sequences, 2 * PROMPT, vocabulary=60) + 3


def prompt_cache(one: Any, ids: Tensor, **options: Any) -> PromptCache:
    return sinklab.assess(one, ids, parts=["prompt_cache"], **options).result(PromptCache)


def pressed(press: Any, config: Any = hf.LlamaConfig, **options: Any) -> dict[str, Any]:
    done = prompt_cache(model(config), tokens(), press=press, caches=(8,), **options)
    return {one.method: one for one in done.methods} | {"unchanged": done.unchanged, "rows": list(done.rows())}


def test_a_press_has_the_loss_of_the_policy_that_keeps_the_same_keys() -> None:
    found = pressed(Recent(6), kept=(0, 2))
    policies = pressed(None, budgets=(6,), kept=(0, 2))
    for press, policy in (("Recent", "recent"), ("Recent, first 2 kept", "first and recent")):
        assert found[press].loss == pytest.approx(policies[policy].loss, abs=1e-10)
        assert (found[press].budget, found[press].first_kept) == (6, policies[policy].first_kept)
    assert found["Recent, first 2 dropped"].loss == pytest.approx(found["Recent"].loss, abs=1e-10)
    assert found["Recent, first 2 kept"].first_kept_by_head == [[1.0, 1.0]] * 2
    assert [row.answer for row in found["rows"]][1:] == [
        f"Recent{words}, 6 of 16 keys" for words in ("", ", first 2 kept", ", first 2 dropped")
    ]


def test_a_press_that_keeps_all_keys_costs_nothing_and_one_without_scores_has_no_variants() -> None:
    found = pressed({"all": Recent(PROMPT), "hidden": HiddenFirst(0)})
    assert found["all"].loss == pytest.approx(found["unchanged"].loss, abs=1e-10)
    assert found["hidden"].kl > 1e-6
    assert found["hidden"].first_kept_by_head == [[0.0, 1.0]] * 2
    assert not {"hidden, first 4 kept", "hidden, first 4 dropped"} & set(found)


def test_the_presses_are_recorded_and_a_repeated_call_with_another_is_refused(tmp_path: Any) -> None:
    given: dict[str, Any] = {"parts": ["prompt_cache"], "out": tmp_path}
    done = sinklab.assess(model(), tokens(), press=Recent(6), **given)
    assert done.remarks() == ["prompt_cache: KV heads that keep the first key: 0 % with Recent"]
    assert done.asked["presses"] == done.result(PromptCache).presses == {"Recent": "Recent(6)"}
    assert sinklab.assess(model(), tokens(), press=Recent(6), **given).results == done.results
    with pytest.raises(InputError, match="presses"):
        sinklab.assess(model(), tokens(), press=Recent(7), **given)


def test_a_press_that_cannot_be_run_is_refused_with_its_reason() -> None:
    with pytest.raises(InputError, match="`press` belongs to the part `prompt_cache`"):
        sinklab.assess(model(), tokens(), parts=["eviction"], press=Recent(6))
    with pytest.raises(InputError, match=r"Recent\(99\) failed: RuntimeError: selected index k out of range"):
        pressed(Recent(99))
    with pytest.raises(InputError, match="presses need a Hugging Face model"):
        PromptCache.run(PartInput(small(), part_settings(), some_tokens(), presses={"a": Recent(4)}))
    window = hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=8))
    with pytest.raises(InputError, match="sliding window of 8 tokens"):
        sinklab.assess(window, tokens(), parts=["prompt_cache"], press=Recent(6))


def imported() -> Any:
    return pytest.importorskip("kvpress", reason="kvpress pins an earlier transformers: install it with --no-deps")


def presses() -> dict[str, Any]:
    kvpress = imported()

    def snapkv(ratio: float = 0.5) -> Any:
        return kvpress.SnapKVPress(ratio, window_size=4)

    return {
        "none": snapkv(0.0),
        "SnapKV": snapkv(),
        "AdaKV": kvpress.AdaKVPress(snapkv()),
        "PyramidKV": kvpress.PyramidKVPress(0.5, window_size=4, beta=2),
        "CriticalKV": kvpress.CriticalKVPress(snapkv()),
        "CriticalAdaKV": kvpress.CriticalAdaKVPress(snapkv()),
        "expected attention": kvpress.ExpectedAttentionPress(0.5, n_sink=2),
        "rerotated": kvpress.KeyRerotationPress(kvpress.KnormPress(0.5)),
        "ThinK": kvpress.ThinKPress(0.5, window_size=4),
        "chunks": kvpress.ChunkPress(kvpress.KnormPress(0.5), chunk_length=8),
    }


def by_tokens(one: Any, press: Any, row: Tensor) -> Tensor:
    """Logits of the second half, token by token, with kvpress's own hooks and fake keys."""
    prompt = len(row) // 2
    cache: Any = hf.DynamicCache()

    def former(module: Any, args: Any, kwargs: Any) -> Any:
        now = cache.get_seq_length(module.layer_idx) + torch.arange(kwargs["hidden_states"].shape[1])
        given = kwargs.get("cache", kwargs.get("past_key_values"))
        return args, {**kwargs, "past_key_values": given, "cache_position": now}

    with ExitStack() as stack, press(one):
        for layer in one.model.layers:
            stack.callback(layer.self_attn.register_forward_pre_hook(former, with_kwargs=True).remove)
        one.model(input_ids=row[None, :prompt], past_key_values=cache)
    start = cache.get_seq_length() if "Rerotation" in type(press).__name__ else prompt
    logits = []
    for place in range(prompt, 2 * prompt):
        here = torch.tensor([[start + place - prompt]])
        step = one(input_ids=row[None, place : place + 1], past_key_values=cache, position_ids=here)
        logits.append(step.logits[0, 0])
    return torch.stack(logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_presses_of_kvpress_have_the_losses_of_reading_token_by_token() -> None:
    given, one = presses(), model()
    found = pressed(given)
    for name, press in given.items():
        with torch.no_grad():
            logits = torch.stack([by_tokens(one, press, row) for row in tokens()])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, PROMPT + 1 :].flatten())
        assert found[name].loss == pytest.approx(float(loss), abs=1e-7), name
        assert (f"{name}, first 4 kept" in found) == (name not in ("ThinK", "chunks"))
    assert found["none"].loss == pytest.approx(found["unchanged"].loss, abs=1e-10)
    assert found["AdaKV, first 4 kept"].first_kept == 1
    assert found["AdaKV, first 4 dropped"].first_kept == 0


@pytest.mark.parametrize("config", [hf.LlamaConfig, hf.MistralConfig, hf.Phi3Config, hf.Qwen2Config, hf.Qwen3Config])
def test_policies_of_the_part_are_those_of_kvpress(config: Any) -> None:
    given, kvpress = presses(), imported()
    given["TOVA"], given["KeyDiff"], given["key norm"] = (
        kind(0.5) for kind in (kvpress.TOVAPress, kvpress.KeyDiffPress, kvpress.KnormPress)
    )
    ratios = [1 - keys / PROMPT for keys in (12, 4)]  # kvpress divides the budgets of layers otherwise
    given["PyramidKV"] = kvpress.PerLayerCompressionPress(given["SnapKV"], ratios)
    found = pressed(given, config, kept=(2,))
    policies = pressed(None, config, budgets=(PROMPT // 2,), kept=(2,))
    compared = [*(set(given) & set(policies)), "SnapKV without sink"]
    assert len(compared) == 8
    for name in compared:
        press = found[name.replace(" without sink", ", first 2 dropped")]
        assert press.loss == pytest.approx(policies[name].loss, abs=1e-9), name
        assert press.first_kept == policies[name].first_kept


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_policies_and_presses_have_the_losses_of_a_trained_model_that_reads_token_by_token(data_dir: Path) -> None:
    kvpress, folder = imported(), data_dir / "models" / "TinyStories-656K"
    one: Any = hf.AutoModelForCausalLM.from_pretrained(folder).eval()
    lines = (data_dir / "domains" / "tinystories.jsonl").read_text("utf-8").splitlines()[:40]
    text = "\n\n".join(json.loads(line)["text"] for line in lines)
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :1024].view(4, 256)
    budget = KeyBudget(32, layers=2)
    layers: list[Any] = [SimpleNamespace(index=n, length=128) for n in (1, 2)]

    def snapkv() -> Any:
        return kvpress.SnapKVPress(0.75, window_size=16)

    given = {
        "SnapKV": snapkv(),
        "AdaKV": kvpress.AdaKVPress(snapkv()),
        "PyramidKV": kvpress.PerLayerCompressionPress(snapkv(), [1 - pyramid(n, budget) / 128 for n in layers]),
        "expected attention": kvpress.ExpectedAttentionPress(0.75),
        "TOVA": kvpress.TOVAPress(0.75),
        "KeyDiff": kvpress.KeyDiffPress(0.75),
        "key norm": kvpress.KnormPress(0.75),
        "first and recent": kvpress.StreamingLLMPress(0.75),
        "CriticalKV": kvpress.CriticalKVPress(snapkv()),
        "KVzip": kvpress.KVzipPress(0.75),
    }
    found = {one.method: one for one in prompt_cache(one, ids, press=given).methods}
    policies = {one.method: one for one in prompt_cache(one, ids, budgets=(32,)).methods}
    for name, press in given.items():
        with torch.no_grad():
            logits = torch.stack([by_tokens(one, press, row) for row in ids])
        loss = float(F.cross_entropy(logits[:, :-1].flatten(0, 1).double(), ids[:, 129:].flatten()))
        for by_name in (found, policies) if name in policies else (found,):
            assert by_name[name].loss == pytest.approx(loss, abs=2e-6), name
