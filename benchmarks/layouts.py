"""One die of each published layout of 128, compiled offline at full size: collectives, weights, memory, cost.

    python -m benchmarks.layouts [--model NAME …] [--rank R] [--json FILE]

Every compilation is ``cannopy compile MODEL --size full --form serving --offline --rank R --parallel FILE`` in its own
process with one thread, first without and then with a compile cache (`benchmarks.full_size`); FILE is the one in
examples/parallel. Weights are compared with a formula over the sizes of the configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.full_size import measure, over
from cannopy.fx_passes.parallel import Parallel
from cannopy.models.deepseek import DeepseekConfig
from cannopy.models.longcat import LongcatConfig
from cannopy.models.zoo import preset
from cannopy.options import sizes_of

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "parallel"
BATCH = {"deepseek-v3.2": 2, "deepseek-r1": 2, "longcat-flash": 4, "kimi-k2": 1}
"""Requests per die."""
OPERATIONS = ("HcomAllGather", "HcomReduceScatter", "HcomAllToAll", "HcomAllReduce", "MoeDistributeDispatchV2",
              "MoeDistributeCombineV2")


def deepseek(c: DeepseekConfig, p: Parallel) -> tuple[int, int]:
    """(BF16, FP32) elements of one die of DeepSeek-V3.2, R1 or Kimi-K2 in decode."""
    heads, hidden, layers = c.num_attention_heads, c.hidden_size, c.num_hidden_layers
    attention = (hidden * c.q_lora_rank + c.q_lora_rank * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
                 + hidden * (c.kv_lora_rank + c.qk_rope_head_dim)
                 + heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
                 + heads * c.v_head_dim * hidden // p.o_proj_tp)
    norms = 2 * hidden + c.q_lora_rank + c.kv_lora_rank
    if c.index_topk:
        attention += c.q_lora_rank * c.index_n_heads * c.index_head_dim + hidden * (c.index_head_dim + c.index_n_heads)
        norms += 2 * c.index_head_dim
    dense = 3 * hidden * c.intermediate_size // p.dense_tp
    experts = 3 * hidden * c.moe_intermediate_size * (c.n_routed_experts // p.ep + c.n_shared_experts)
    vocabulary = c.vocab_size * hidden // p.embed_tp + c.vocab_size * hidden // p.lm_head_tp
    sparse = layers - c.first_k_dense_replace
    narrow = layers * (attention + norms) + c.first_k_dense_replace * dense + sparse * experts + vocabulary + hidden
    return narrow, sparse * (hidden + 1) * c.n_routed_experts + c.qk_rope_head_dim // 2


def longcat(c: LongcatConfig, p: Parallel) -> tuple[int, int]:
    """(BF16, FP32) elements of one die of LongCat-Flash in decode."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    attention = (hidden * c.q_lora_rank + c.q_lora_rank * heads * (c.qk_nope_head_dim + c.qk_rope_head_dim)
                 + hidden * (c.kv_lora_rank + c.qk_rope_head_dim)
                 + heads * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
                 + heads * c.v_head_dim * hidden // p.o_proj_tp)
    norms = 2 * hidden + c.q_lora_rank + c.kv_lora_rank
    dense = 3 * hidden * c.ffn_hidden_size // p.dense_tp
    experts = 3 * hidden * c.expert_ffn_hidden_size * c.n_routed_experts // p.ep
    vocabulary = c.vocab_size * hidden // p.embed_tp + c.vocab_size * hidden // p.lm_head_tp
    router = c.num_layers * (hidden + 1) * (c.n_routed_experts + c.zero_expert_num)
    return (c.num_layers * (2 * (attention + norms + dense) + experts) + vocabulary + hidden,
            router + c.qk_rope_head_dim // 2)


def weights(name: str, p: Parallel) -> int:
    """Bytes of the weights of one die, without constants such as a causal mask."""
    from cannopy.models import zoo

    config: Any = zoo.build_serving(preset(name, "full")).config
    narrow, wide = longcat(config, p) if isinstance(config, LongcatConfig) else deepseek(config, p)
    return 2 * narrow + 4 * wide


def row(name: str, rank: int) -> dict[str, Any]:
    """Cold and warm compilation of one die of the model's published layout."""
    file = FOLDER / f"{name}.yaml"
    more = ["--parallel", str(file), "--rank", str(rank), "--batch", str(BATCH[name])]
    with tempfile.TemporaryDirectory(prefix="cannopy-layouts-") as folder:
        cold = measure(name, "serving", "decode", "atlas-a3", Path(folder), more)
        warm = {} if "error" in cold else measure(name, "serving", "decode", "atlas-a3", Path(folder), more)
    parallel = sizes_of(file)
    assert parallel is not None
    return {"model": name, "form": f"serving, {parallel}", "cold": cold, "warm": warm,
            "formula": weights(name, parallel)}


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    cold = found["cold"]
    if "error" in cold:
        return f"| {found['model']} | {cold['error'].splitlines()[0]} |" + "  |" * 8
    counts = ", ".join(f"{name} {cold['ge_ops'][name]}" for name in OPERATIONS if name in cold["ge_ops"])
    memory = cold["memory"]
    return (f"| {found['model']} | {found['form'].partition(', ')[2]} | {counts} | {memory['weights']} "
            f"| {memory['weights'] - found['formula']} | {memory['total'] / 1e9:.1f} "
            f"| {cold['schedule']['predicted_us'] / 1000:.1f} | {cold['cpu']:.0f} | {found['warm'].get('cpu', 0):.1f} "
            f"| {cold['peak'] / 1e9:.2f} |")


def main() -> int:
    """Measure and print; 1 when something fails, is over a limit, or weighs something else than the formula."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=list(BATCH), choices=list(BATCH))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    print("| model | layout | collectives | weights, bytes | more than the formula | memory of a die, GB "
          "| predicted step, ms | first time, s | from cache, s | peak, GB |\n" + "|---" * 10 + "|", flush=True)
    rows = []
    for name in args.model:
        rows.append(row(name, args.rank))
        print(line(rows[-1]), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    missed = [sentence for found in rows for sentence in over(found)]
    missed += [f"{r['model']}: weights differ from the formula" for r in rows
               if "error" not in r["cold"] and r["cold"]["memory"]["weights"] != r["formula"]]
    print("\n".join(missed), file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
