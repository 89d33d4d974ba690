"""One spelling for what models write in many ways. Each module holds one pass: ``run(program) -> int`` changes."""
