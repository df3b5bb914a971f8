"""A client of inference servers: the log-probabilities of a prompt's tokens.

Servers return them in different ways. These are tried in order, until one returns log-probabilities of the prompt:

    /v1/completions   prompt_logprobs (vLLM), or echo with logprobs (SGLang, llama-cpp-python)
    /v1/completions   echo with logprobs only, for servers that refuse unknown fields
    /generate         return_logprob with logprob_start_len 0 (SGLang)
    /completion       n_probs (llama.cpp): the most probable next tokens, after beginnings of the prompt

llama.cpp's server does not return log-probabilities of the prompt (ggml-org/llama.cpp#27174). It is asked for the next
token after `BEGINNINGS` beginnings of the prompt, which its prompt cache makes cheap. A text is tokenised by /tokenize,
with the special tokens that it gets in a completion.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.errors import InputError

TIMEOUT_S = 600.0
BEGINNINGS = 64
LISTED = 10  # most probable next tokens that llama.cpp is asked for
REFUSED = (401, 403)
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class ScoredToken:
    """The log-probability of a token, given all tokens of the prompt before it.

    Attributes:
        place: index of the token in the prompt, counted from its end: -1 is the last token, 0 the token after it.
        token: its id; None for the prompt's own token.
        log_p: log-probability, in nats.
    """

    place: int
    token: int | None
    log_p: float


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of a prompt as a server computes them.

    Attributes:
        way: the request that returned them, such as "prompt_logprobs of /v1/completions".
        scored: the scored tokens.
        length: number of tokens of the prompt, as the server counts them; None if it does not return it.
        tokens: ids of the last tokens of the prompt; empty if the server does not return them.
        echoed: whether they are those of an echo, without token ids.
    """

    way: str
    scored: list[ScoredToken]
    length: int | None
    tokens: list[int] = field(default_factory=list)
    echoed: bool = False


class Server:
    """An inference server with an OpenAI-compatible interface.

    Args:
        url: address of the server, with or without /v1 at the end.
        name: name of the model at the server; None for the first of the models that it lists.
        key: API key, sent as a bearer token.

    Raises:
        InputError: if the address is invalid, or the server cannot be reached or refuses the key.
    """

    def __init__(self, url: str, name: str | None = None, key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"{url!r} is not the address of a server: pass one such as http://localhost:8000/v1")
        self.root, self._key = url.rstrip("/").removesuffix("/v1"), key
        self.name = name or self._first_model()

    def score(self, prompt: Prompt) -> PromptScores:
        """Return the log-probabilities of a prompt: a text, which the server tokenises, or token ids.

        Raises:
            InputError: if the server cannot be reached, or returns no log-probabilities of the prompt. The message
                contains its answers.
        """
        failures = list[str]()
        for way in (self._completions, self._echo, self._generate, self._next_tokens):
            try:
                if found := way(prompt):
                    return found
            except InputError:  # a ValueError
                raise
            except _RefusedError as error:
                failures.append(str(error))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                failures.append(f"an answer has another form than expected ({type(error).__name__}: {error})")
        told = "; ".join(dict.fromkeys(failures)) or "its answers have none"
        kind = "a text" if isinstance(prompt, str) else "token ids"
        raise InputError(f"the server returns no log-probabilities of a prompt of {kind}: {told}")

    def _completions(self, prompt: Prompt) -> PromptScores | None:
        answer = self._ask("/v1/completions", self._echoed(prompt) | {"prompt_logprobs": 1})
        listed = answer["choices"][0].get("prompt_logprobs")
        if not listed:
            return _of_echo(answer, prompt)
        return _of_listed(listed, prompt)

    def _echo(self, prompt: Prompt) -> PromptScores | None:
        return _of_echo(self._ask("/v1/completions", self._echoed(prompt)), prompt)

    def _echoed(self, prompt: Prompt) -> dict[str, Any]:
        """Return a request; a maximum of 0 tokens is refused by vLLM, and means no limit for llama-cpp-python."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        return {
            "model": self.name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1
        }  # fmt: skip

    def _generate(self, prompt: Prompt) -> PromptScores | None:
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
        sampling = {"max_new_tokens": 1, "temperature": 0}
        answer = self._ask(
            "/generate", given | {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        )
        listed = answer["meta_info"]["input_token_logprobs"]
        scored = [ScoredToken(at - len(listed), None, one[0]) for at, one in enumerate(listed) if one[0] is not None]
        return PromptScores("return_logprob of /generate", scored, len(listed), [one[1] for one in listed])

    def _next_tokens(self, prompt: Prompt) -> PromptScores | None:
        text = isinstance(prompt, str)
        ids = self._ask("/tokenize", {"content": prompt, "add_special": True})["tokens"] if text else list(prompt)
        count, scored = min(BEGINNINGS, len(ids)), list[ScoredToken]()
        options = {"n_predict": 1, "n_probs": LISTED, "temperature": 0, "cache_prompt": True}
        for end in (len(ids) * number // count for number in range(1, count + 1)):
            answer = self._ask("/completion", {"prompt": ids[:end]} | options)
            tops = answer["completion_probabilities"][0]["top_logprobs"]
            scored += [ScoredToken(end - len(ids), one["id"], one["logprob"]) for one in tops]
        return PromptScores("n_probs of /completion", scored, len(ids), ids) if scored else None

    def _first_model(self) -> str:
        try:
            return str(self._ask("/v1/models")["data"][0]["id"])
        except InputError:
            raise
        except (_RefusedError, KeyError, IndexError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.root}/v1/models does not name a model ({error}): check the address, or pass --served-name"
            ) from error

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, a POST if it has a body, and return the parsed answer."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.root + path, data, headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode(errors="replace").split())[:200]
            if error.code in REFUSED:
                raise InputError(
                    f"{self.root + path} refuses access ({error.code}): pass the variable of the key, --api-key-env"
                ) from error
            raise _RefusedError(f"{path} answers {error.code} {said}") from error
        except (OSError, ValueError) as error:  # ValueError: an invalid port
            if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                raise _RefusedError(f"{path} does not answer in JSON") from error
            raise InputError(
                f"cannot reach {self.root}: {getattr(error, 'reason', None) or error}. Start the server, or check the "
                "address"
            ) from error


class _RefusedError(Exception):
    """The server does not serve a request."""


def _of_listed(listed: list[dict[str, Any] | None], prompt: Prompt) -> PromptScores:
    """Read vLLM's prompt_logprobs: by token id, that of the prompt's own token first, then the most probable one."""
    scored, tokens = list[ScoredToken](), list[int]()
    for index, options in enumerate(listed):
        if options:
            place = index - len(listed)
            known = not isinstance(prompt, str) and -place <= len(prompt)
            own = str(prompt[place]) if known else next(iter(options))
            scored.append(ScoredToken(place, None, options[own]["logprob"]))
            tokens.append(int(own))
    return PromptScores("prompt_logprobs of /v1/completions", scored, len(listed), tokens)


def _of_echo(answer: dict[str, Any], prompt: Prompt) -> PromptScores | None:
    """Read token_logprobs of the echoed prompt and the generated token; None if the prompt is not echoed.

    llama-cpp-python leaves out BOS, or else the generated token, whose place in the text is therefore compared.
    """
    choice, usage = answer["choices"][0], answer.get("usage") or {}
    listed = choice.get("logprobs") or {}
    log_ps, offsets = listed.get("token_logprobs") or [], listed.get("text_offset") or [-1]
    if isinstance(prompt, str) and min(offsets) >= 0:
        echoed = [log_p for log_p, offset in zip(log_ps, offsets, strict=True) if offset < len(prompt)]
    else:
        echoed = log_ps[: len(log_ps) - usage.get("completion_tokens", 1)]
    scored = [ScoredToken(at - len(echoed), None, log_p) for at, log_p in enumerate(echoed) if log_p is not None]
    if not scored:
        return None
    return PromptScores("echo of /v1/completions", scored, usage.get("prompt_tokens"), echoed=True)
