"""Counts that must come out exactly as published: cache bytes, MACs and scores, indexer size, ratios of prefill."""

from __future__ import annotations

from dataclasses import dataclass

from cannopy.stream_scheduler.calibration import table
from cannopy.stream_scheduler.cost import kernel, prefill_plans
from cannopy.stream_scheduler.cost.kernel import Role

LAYERS = 61
TRAFFIC = {
    "MLA": ("fused_infer_attention_mla", {"heads": 128, "cache_bytes": 1}),
    "SFA": ("sparse_flash_attention", {"heads": 128, "cache_bytes": 1}),
    "LI": ("lightning_indexer", {"key_bytes": 1}),
}
"""Op of traffic.csv to kernel and sizes. The published table counts one byte an element, and MACs of q k alone."""

PREFILL = {"context": 65536, "selected": 2048, "heads": 128, "rank": 512, "rope": 64, "nope": 128, "value_dim": 128}


@dataclass(frozen=True)
class Exact:
    """One count: published as printed, computed to the same number of digits."""

    name: str
    published: str
    computed: str

    @property
    def equal(self) -> bool:
        return float(self.published) == float(self.computed)


def traffic() -> list[Exact]:
    """Every figure of traffic.csv."""
    found = []
    for row in table("traffic"):
        name, sizes = TRAFFIC[row["op"]]
        q_tokens = int(row["mtp"]) + 1
        work = kernel(name).work(batch=int(row["batch"]), q_tokens=q_tokens, context=int(row["context"]), **sizes)
        label = f"{row['op']}, {q_tokens} query tokens, batch {row['batch']}, context {row['context']}"
        values = {
            "kv_mib": work.read[Role.CACHE] / 2**20,
            "gmac_qk": work.counts["qk_macs"] / 1e9,
            "scores_mib": work.counts["scores"] / 2**20,
        }
        found += [Exact(f"{label}: {key}", row[key], f"{v:.{_digits(row[key])}f}") for key, v in values.items()]
    return found


def indexer() -> list[Exact]:
    """Parameters of DeepSeek-V3.2's indexer, and its key cache for four sequences of 64K in BF16."""
    prolog = kernel("indexer_prolog").work(tokens=1, hidden=7168, q_rank=1536, up_bytes=1, down_bytes=1)
    keys = kernel("lightning_indexer").work(batch=4, q_tokens=1, context=65536)
    return [
        Exact("indexer parameters, 1e9", "0.8515", f"{LAYERS * prolog.weight_bytes / 1e9:.4f}"),
        Exact("indexer key cache, GB", "4.094", f"{LAYERS * keys.read[Role.CACHE] / 1e9:.3f}"),
    ]


def ratios() -> list[Exact]:
    """Ratios between the ways to prefill 64K tokens."""
    published = {
        "MACs, full over sparse": "32",
        "reads, naive sparse over naive full": "2048",
        "MACs, absorbed over naive": "3.4",
        "reads, naive over absorbed": "71",
    }
    return [
        Exact(name, value, f"{prefill_plans.ratio(name, PREFILL):.{_digits(value)}f}")
        for name, value in published.items()
    ]


def exact_lines() -> list[str]:
    """The counts as a Markdown table."""
    rows = [f"| {e.name} | {e.published} | {e.computed} |" for e in (*traffic(), *indexer(), *ratios())]
    return [
        "Cache bytes and scores at one byte an element, MACs of q k alone, as the published table counts them.",
        "",
        "| count | published | computed |",
        "| --- | --- | --- |",
        *rows,
        "",
    ]


def _digits(printed: str) -> int:
    return len(printed.partition(".")[2])
