"""Compare the times of `import sinklab` and `import transformers`, alternately in fresh interpreters."""

import statistics
import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def seconds(module: str) -> float:
    """Return the seconds that a fresh interpreter takes to import a module."""
    command = [sys.executable, "-c", CODE.format(module=module)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(repeats: int = 7) -> None:
    """Print the median times over `repeats` imports of each module, and their ratio."""
    times: dict[str, list[float]] = {"sinklab": [], "transformers": []}
    for _ in range(repeats):
        for module, taken in times.items():
            taken.append(seconds(module))
    ours, theirs = (statistics.median(taken) for taken in times.values())
    print(f"import sinklab {ours:.3f} s, import transformers {theirs:.3f} s, ratio {ours / theirs:.3f}")


if __name__ == "__main__":
    main()
