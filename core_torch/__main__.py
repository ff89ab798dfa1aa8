"""``python -m core_torch`` is the command ``twinshard``."""

from core_torch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
