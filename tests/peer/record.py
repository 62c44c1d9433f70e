"""Write down what the package ``kernels`` offers and does: ``python tests/peer/record.py PEER_PYTHON``.

Writes ``tests/data/peer/names.json`` and ``calls.json``, which the tests compare kernelhub with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from kernelhub.serve import LocalHub

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer.scene import RECORDED, SCRIPTS, make_calls, scene_facts, write_scene


def main(python: str) -> None:
    names = subprocess.run([python, SCRIPTS / "names.py", "kernels"], capture_output=True, text=True, check=True).stdout
    (RECORDED / "names.json").write_text(names, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        root, home = Path(folder, "repositories"), Path(folder, "home")
        root.mkdir()
        home.mkdir()
        write_scene(root)
        with LocalHub(root) as hub:
            outcomes = make_calls(python, "kernels", scene_facts(root, Path(folder), hub), home, hub.url)
    (RECORDED / "calls.json").write_text(json.dumps(outcomes, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
