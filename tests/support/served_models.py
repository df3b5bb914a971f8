"""Servers on the loopback that compute the log-probabilities of a transformers model, in the forms of real servers."""

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from families import GROUPED
from tiny_models import tiny_model

WINDOW = 16
KEY = "secret"
ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
CONFIGS: dict[str, Callable[..., Any]] = {
    "gpt-oss": lambda **sizes: hf.GptOssConfig(
        **(ROPE | sizes),
        num_local_experts=2,
        num_experts_per_tok=2,  # all of them, so that rounding routes no token to another expert
        sliding_window=WINDOW,
    ),
    "gemma2": lambda **sizes: hf.Gemma2Config(
        **sizes, sliding_window=WINDOW, attn_logit_softcapping=3.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda **sizes: hf.Gemma3TextConfig(**sizes, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "mistral": lambda **sizes: hf.MistralConfig(**sizes, sliding_window=WINDOW),
    "llama": lambda **sizes: hf.LlamaConfig(**sizes),
}


@contextmanager
def started(command: Callable[[int], list[str]], ready: str, env: dict[str, str] | None = None) -> Iterator[str]:
    """Run the command of a server for a free port, and yield its address once it has printed `ready` and listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        command(port), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**(env or os.environ)}
    )
    assert process.stdout is not None
    try:
        printed = list[str]()
        for line in process.stdout:
            printed.append(line)
            if ready in line:
                break
        else:
            raise AssertionError(f"the server did not start:\n{''.join(printed)}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # a full pipe would block the server
        while process.poll() is None:  # it listens a moment later
            with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


def saved_model(folder: Path, family: str, *, bos: bool = True, **changed: Any) -> Path:
    """A random model with sharp attention, its config possibly changed, and a tokenizer that may put <s> first."""
    tokenizer: Any = hf.AutoTokenizer.from_pretrained(tiny_model(folder, bos=bos))
    sizes = GROUPED | {"vocab_size": len(tokenizer), "max_position_embeddings": 512} | changed
    torch.manual_seed(0)
    model: Any = hf.AutoModelForCausalLM.from_config(CONFIGS[family](**sizes), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.5, 2.0)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, *altered: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model in memory, with its config or its sink logits altered: sinks, window or softcap missing."""
    config: Any = hf.AutoConfig.from_pretrained(folder)
    if "window" in altered:
        config.sliding_window = 10**6
    if "softcap" in altered:
        config.attn_logit_softcapping = None
    model: Any = hf.AutoModelForCausalLM.from_pretrained(
        folder, config=config, attn_implementation="eager", dtype=dtype
    )
    if "sinks" in altered:
        for layer in model.model.layers:
            layer.self_attn.sinks.data.fill_(-1e4)
    return model.eval()


class ServedModel:
    """A model behind a server, and the form of its answers.

    Args:
        form: that of vLLM ("prompt_logprobs"), of the OpenAI interfaces of SGLang and llama-cpp-python ("echo"), the
            same that refuses other fields ("strict"), of llama-cpp-python without BOS, where the log-probability of
            each token is that of following itself ("late"), of SGLang ("generate"), of llama.cpp ("next"), or none
            ("chat").
        front: function from the token ids of a prompt, and whether it is a text, to the ids that the model reads.
    """

    def __init__(
        self, model: Any, folder: Path, form: str, front: Callable[[list[int], bool], list[int]] | None = None
    ) -> None:
        self.model, self.form, self.front = model, form, front or (lambda ids, is_text: ids)
        self.tokenizer: Any = hf.AutoTokenizer.from_pretrained(folder)

    def read(self, prompt: Any) -> tuple[list[int], torch.Tensor]:
        """Token ids of a prompt as they are read, and log p of every next token, (T, V)."""
        ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        ids = self.front(list(ids), isinstance(prompt, str))
        with torch.no_grad():
            return ids, torch.log_softmax(self.model(torch.tensor([ids])).logits[0].double(), -1)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request."""
        if (path, self.form) == ("/tokenize", "next"):
            return 200, {"tokens": self.read(body["content"])[0]}
        served = {"generate": "/generate", "next": "/completion", "chat": ""}.get(self.form, "/v1/completions")
        if path != served:
            return 404, {"error": f"no {path}"}
        ids, log_p_TV = self.read(body.get("prompt", body.get("input_ids", body.get("text"))))
        own = [None, *(float(log_p_TV[t, token]) for t, token in enumerate(ids[1:]))]
        if self.form == "late":
            own = [None, *(float(log_p_TV[t, token]) for t, token in enumerate(ids) if t > 0)]
        if self.form == "generate":
            listed = [[log_p, token, None] for log_p, token in zip(own, ids, strict=True)]
            return 200, {"text": "", "meta_info": {"input_token_logprobs": listed}}
        if self.form == "next":
            top = log_p_TV[-1].topk(body["n_probs"])
            listed = [
                {"id": token, "logprob": log_p}
                for log_p, token in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
            return 200, {"completion_probabilities": [{"top_logprobs": listed}], "tokens_evaluated": len(ids)}
        if "prompt_logprobs" in body and self.form == "strict":
            return 422, {"error": "unknown field prompt_logprobs"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1}
        choice: dict[str, Any] = {"text": "", "logprobs": {"token_logprobs": [*own, -1.5]}}
        if self.form == "late" and isinstance(body["prompt"], str):  # without the generated token
            starts = [len(self.tokenizer.decode(ids[:t])) for t in range(len(ids))]
            choice["logprobs"] = {"token_logprobs": own, "text_offset": starts}
        if self.form == "prompt_logprobs":
            first = [None, *(int(row.argmax()) for row in log_p_TV[:-1])]
            choice["prompt_logprobs"] = [
                None if best is None else {str(one): {"logprob": float(row[one])} for one in (token, best)}
                for best, token, row in zip(first, ids, [log_p_TV[0], *log_p_TV[:-1]], strict=True)
            ]
        return 200, {"choices": [choice], "usage": usage}


@contextmanager
def serving(served: ServedModel, key: str | None = None) -> Iterator[str]:
    """Serve a model on the loopback; the address is that of its OpenAI interface.

    Args:
        key: API key that every request must have.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(200, {"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                self._reply(401, {"error": "no key"})
            else:
                self._reply(*served.answer(self.path, body))

        def _reply(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
