"""The repository's folders, wherever the file that asks for them is."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
#: Modules, which the demo and the scripts of the documentation import by their plain names.
EXAMPLES = ROOT / "examples" / "python"
