"""What a graph costs on a chip, and what follows from that: hardware descriptions, cost model, simulator, plans.

    hardware/     chips as YAML, each figure with its source
    calibration/  published measurements
    constants/    what was fitted on them
    cost/         bytes, MACs and time of each kernel
"""
