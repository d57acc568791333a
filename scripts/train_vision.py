"""Train an image encoder; start with ``accelerate launch scripts/train_vision.py --config FILE``."""

import sys

from simcse_weince.cli import main

if __name__ == "__main__":
    sys.exit(main(["vision-train", *sys.argv[1:]]))
