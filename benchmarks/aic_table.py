"""Writes a table of pass times (docs/timing.md) that aiconfigurator-core predicts, for machines without it.

    python benchmarks/aic_table.py Qwen/Qwen3-32B h200_sxm --tensor 2 > table.csv

A table that is measured has the same form; this one also shows which passes are worth measuring.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from g2sim.scenarios.aic_timing import AicModel, AicPassTimes, aic_pass_times, literal_version, package_version

PREFILL_REQUESTS = (1, 2, 4, 8, 16)
NEW_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREFIX_TOKENS = (0, 4096, 16384, 65536)
DECODE_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
KNOWN_TOKENS = (1, 256, 4096, 16384, 65536, 262144, 786432)
CONTEXT_LENGTH = 40960


def rows(times: AicPassTimes) -> Iterator[str]:
    """Lines of the table; sums are multiples of the requests, so that means are exact."""
    yield "phase,requests,new_tokens,context_tokens,ms"
    for requests in PREFILL_REQUESTS:
        for new_tokens in sorted({max(requests, tokens) for tokens in NEW_TOKENS}):
            for prefix_tokens in PREFIX_TOKENS:
                duration_ms = times.prefill_ms(requests, prefix_tokens + new_tokens, prefix_tokens)
                yield f"prefill,{requests},{new_tokens},{prefix_tokens},{duration_ms:.4f}"
    for requests in DECODE_REQUESTS:
        most = requests * CONTEXT_LENGTH
        for known_tokens in sorted({min(max(requests, tokens), most) for tokens in KNOWN_TOKENS}):
            yield f"decode,{requests},,{known_tokens},{times.decode_ms(requests, known_tokens):.4f}"


def table(model: str, hardware: str, tensor: int) -> str:
    """The text of the table."""
    served = AicModel(
        model=model,
        hardware=hardware,
        backend_version=None,
        tensor=tensor,
        attention_data=1,
        moe_tensor=1,
        moe_expert=1,
        block_size_tokens=64,
    )
    head = [
        f"# {model} on {hardware}, tensor {tensor}: predicted, not measured.",
        f"# aiconfigurator-core {package_version()}, vLLM {literal_version(served)}; benchmarks/aic_table.py",
    ]
    return "\n".join([*head, *rows(aic_pass_times(served))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a table of predicted pass times to stdout.")
    parser.add_argument("model")
    parser.add_argument("hardware")
    parser.add_argument("--tensor", type=int, default=1)
    options = parser.parse_args()
    sys.stdout.write(table(options.model, options.hardware, options.tensor))


if __name__ == "__main__":
    main()
