"""What a terminal shows of a report."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from cannopy.report import CompileReport
from cannopy.report_view import plan_line


def test_each_table_is_there_once() -> None:
    report = CompileReport.of({}, [], [], {"captured": 3, "final": 2}, "host", {}, [], {None: {"aten.mm": 2}})
    console = Console(width=100, record=True)
    console.print(replace(report, kernels={"MatMulV2": 2}))
    lines = console.export_text().splitlines()
    assert [line for line in lines if line.startswith("Device kernels")] == [
        "Device kernels per layer", "Device kernels as torchair submits them"]
    assert sum("aten.mm" in line for line in lines) == 1
    assert sum("MatMulV2" in line for line in lines) == 1


def test_what_a_plan_is_made_of() -> None:
    schedule = {"predicted_us": 1000.0, "lower_bound_us": 900.0, "serial_us": 1100.0, "streams": 2, "core_limits": [],
                "prefetches": 3, "super_kernels": 1}
    assert plan_line(schedule).endswith("plan: 2 streams, 3 prefetches, 1 SuperKernel")
