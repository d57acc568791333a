"""Run a study of losses over seeds; start with ``python scripts/run_study.py scripts/studies/FILE.yaml``."""

import sys

from simcse_weince.cli import main

if __name__ == "__main__":
    sys.exit(main(["study", *sys.argv[1:]]))
