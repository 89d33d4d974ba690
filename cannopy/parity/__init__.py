"""Whether a compiled run is as close to float64 as plain bf16 is, with its discrete picks held fixed."""
