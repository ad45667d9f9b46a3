"""``python -m jemhooks``."""

from .cli import main

raise SystemExit(main())
