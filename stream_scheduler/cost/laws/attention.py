"""Attention classes: whole cache, selected tokens, indexer, prefill."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cannopy.stream_scheduler.cost.chip import Chip, Parts
from cannopy.stream_scheduler.cost.kernel import Work


def _decode(rate: str) -> Callable[[Work, Chip], Parts]:
    def law(work: Work, chip: Chip) -> Parts:
        """fixed + a term per sequence + the chain of blocks of one sequence + cache load + cube, additive.

        The chain does not get shorter with more cores, up to the context at which a sequence is split over them.
        """
        c = chip.constants
        chain = c["attention_decode.chain"] * min(work.sizes["context"], c["attention_decode.split"]) / 1024
        return Parts(
            launch=c["attention_decode.fixed"] + c["attention_decode.sequence"] * work.counts["sequences"] + chain,
            hbm=chip.hbm_us(chip.from_hbm(work), c[rate]),
            cube=chip.cube_us(work.macs, work.kernel.mac_dtype, c["attention_decode.cube"]),
        )

    return law


def attention_prefill(work: Work, chip: Chip) -> Parts:
    """fixed + max(bytes, rows of queries over the vector cores + causal MACs on the cube)."""
    c = chip.constants
    rows = work.counts["query_heads"] / chip.vector_cores
    return Parts(
        launch=c["attention_decode.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["attention_decode.hbm"]),
        vector=rows * c["attention_prefill.row"],
        cube=chip.cube_us(work.macs, work.kernel.mac_dtype, c["attention_prefill.cube"]),
        overlap=0.0,
    )


def sparse_attention(work: Work, chip: Chip) -> Parts:
    """fixed + max(cache rows from HBM, gathering them one by one on the vector cores, cube)."""
    c = chip.constants
    return Parts(
        launch=c["sparse_attention.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["attention_decode.hbm"]),
        vector=work.counts["gathered"] / chip.vector_cores * c["sparse_attention.gather"],
        cube=chip.cube_us(work.macs, work.kernel.mac_dtype, c["sparse_attention.cube"]),
        overlap=0.0,
        pipelined=True,
    )


def lightning_indexer(work: Work, chip: Chip) -> Parts:
    """fixed + max(keys from HBM, scores on the cube, reduction over heads and top-k on the vector cores).

    A row's top-k is split over at most ``lightning_indexer.split`` vector cores, so that few rows do not use all.
    """
    c = chip.constants
    cores = min(chip.vector_cores, math.ceil(work.counts["tasks"] * c["lightning_indexer.split"]))
    cycles = (c["lightning_indexer.searched_cycles"] * work.counts["searched"]
              + c["lightning_indexer.kept_cycles"] * work.counts["kept"])
    select = 1e6 * cycles / (cores * chip.hardware.clock_hz)
    return Parts(
        launch=c["lightning_indexer.fixed"],
        hbm=chip.hbm_us(chip.from_hbm(work), c["attention_decode.hbm"]),
        cube=chip.cube_us(work.macs, work.kernel.mac_dtype, c["lightning_indexer.cube"]),
        vector=select + chip.vector_us(work.vector_ops),
        overlap=0.0,
        pipelined=True,
    )


LAWS: Mapping[str, Callable[[Work, Chip], Parts]] = {
    "attention_decode": _decode("attention_decode.hbm"),
    "attention_gqa": _decode("attention_gqa.hbm"),
    "attention_prefill": attention_prefill,
    "sparse_attention": sparse_attention,
    "lightning_indexer": lightning_indexer,
}
