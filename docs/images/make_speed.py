"""Draw the README's picture from the newest record of benchmarks/ops.py: python docs/images/make_speed.py [FOLDER]"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from docs.images.style import save

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"
WAYS = {  # in the record: label, colour, whether it is drawn with dashes
    "ours": ("rebased", "rebased", "-"),
    "SDPA cuDNN": ("softmax attention: cuDNN", "softmax", "-"),
    "SDPA Flash": ("softmax attention: FlashAttention-2", "softmax", "--"),
    "fla fused_chunk_based": ("flash-linear-attention: fused_chunk_based", "based", "-"),
    "fla parallel_rebased": ("flash-linear-attention: parallel_rebased", "other", "-"),
}


def newest_record() -> dict[str, Any]:
    """The newest complete record of the GPU operators: `--quick` and `--sections` leave out rows."""
    records = (json.loads(path.read_text()) for path in sorted(RECORDS.glob("ops-*.json"), reverse=True))
    return next(record for record in records if record["command"] == "python benchmarks/ops.py")


def nanoseconds_per_token(record: dict[str, Any], way: str) -> dict[int, float]:
    """T to the time of forward and backward per token, where the result was right."""
    rows = [row for row in record["lengths"] if row["way"] == way and row.get("graph_both_ms")]
    return {row["T"]: row["graph_both_ms"] * 1e6 / (row["B"] * row["T"]) for row in rows}


def draw(pyplot: Any, colours: dict[str, str]) -> Any:
    """One line per implementation, named beside its end."""
    record = newest_record()
    figure, axes = pyplot.subplots(figsize=(9.6, 3.9))
    for way, (label, colour, line) in WAYS.items():
        times = nanoseconds_per_token(record, way)
        width = 2.8 if way == "ours" else 1.6
        style = {"color": colours[colour], "lw": width, "ls": line, "marker": "o", "ms": 4}
        axes.plot(list(times), list(times.values()), label=label, **style)
    axes.set(xscale="log", yscale="log", xlabel="tokens T in a sequence", ylim=(5, 2000), xlim=(220, 150_000))
    axes.set_title("nanoseconds per token, forward and backward, on one H200 (12 heads, bf16)", fontsize=11, loc="left")
    ticks = [2**n for n in range(8, 18)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
    axes.minorticks_off()
    axes.grid(lw=0.6)
    axes.tick_params(length=0)
    axes.legend(frameon=False, loc="upper right", fontsize=10, bbox_to_anchor=(1, 0.62))
    return figure


if __name__ == "__main__":
    save("speed", Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent, draw)
