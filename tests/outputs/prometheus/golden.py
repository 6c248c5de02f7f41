"""The recorded exposition of the fixed state; run as a module, it rewrites it."""

from pathlib import Path

from tests.outputs.prometheus.filled import exposition_of, filled_meter

GOLDEN = Path(__file__).parent / "exposition.txt"

if __name__ == "__main__":
    GOLDEN.write_text(exposition_of(filled_meter()))
