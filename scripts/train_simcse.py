"""Train a sentence encoder; start with ``accelerate launch scripts/train_simcse.py --config FILE``."""

import sys

from simcse_weince.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
