"""``python -m cannopy``."""

from cannopy.cli import main

raise SystemExit(main())
