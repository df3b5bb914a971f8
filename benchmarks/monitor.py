"""Cost of `sinklab.monitor`: training steps with and without a record, in turn, in one process.

    python -m benchmarks.monitor [--length 512] [--rounds 7]

Prints the median seconds of a step without the monitor, of a step in which it records, their ratio, and the overhead at
every=100, which is (ratio - 1) / 100.
"""

import argparse
import time
from statistics import median

import torch
import transformers as hf

import sinklab


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    config = hf.LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8
    )
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(config).train()
    optimiser = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(8192, (4, given.length))
    monitor = sinklab.monitor(model, every=2)
    seconds: list[list[float]] = [[], []]
    for step in range(2 * given.rounds + 2):
        start = time.perf_counter()
        optimiser.zero_grad()
        with monitor(step):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        if step > 1:
            seconds[step % 2].append(time.perf_counter() - start)
    recorded, plain = map(median, seconds)
    print(f"T = {given.length}: plain {plain:.3f} s, recorded {recorded:.3f} s, ratio {recorded / plain:.2f}")
    print(f"overhead at every=100: {(recorded / plain - 1):.2f} %")


if __name__ == "__main__":
    main()
