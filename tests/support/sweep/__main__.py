"""Runs the sweep, a surface of it or single cases: `python -m support.sweep [SURFACE [NUMBER ...]]`."""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.sweep.surfaces import SURFACES, tried


def main(words: list[str]) -> int:
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    faults, table = 0, []
    for name in words[:1] or SURFACES:
        numbers = [int(word) for word in words[1:]] or range(SURFACES[name].count)
        start, refused, slow = time.time(), 0, Counter[str]()
        for number in numbers:
            began = time.time()
            with tempfile.TemporaryDirectory() as folder:
                case, verdict = tried(name, number, Path(folder))
            refused += verdict.is_refused
            slow[f"{number} {case.name}"] = round(1000 * (time.time() - began))
            if verdict.fault is not None or len(words) > 1:
                faults += verdict.fault is not None
                print(f"{name} {number}: {case.name}\n    {verdict.fault or 'as it should be'}", flush=True)
        table.append(f"{name:12} {len(numbers):5} inputs, {refused:5} refused, {time.time() - start:5.0f} s")
        print(table[-1], "; slowest (ms):", slow.most_common(4), flush=True)
    print("\n".join([*table, f"{faults} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
