"""Flags, YAML and saved configuration are one thing; what is wrong is named."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml

import simcse_weince
from simcse_weince.errors import InputError
from simcse_weince.sentence.arguments import (
    DataArguments,
    LossArguments,
    ModelArguments,
    SimCSEArguments,
    parse_training_arguments,
)

NEEDED = ["--model_name_or_path", "encoder", "--train_file", "text.txt", "--output_dir", "out"]


def parse(*extra):
    return parse_training_arguments([*NEEDED, *extra])


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_those_of_unsupervised_simcse():
    _, _, loss, training, _ = parse()
    assert (training.per_device_train_batch_size, training.learning_rate, training.num_train_epochs) == (64, 3e-5, 1)
    assert (training.max_seq_length, training.eval_steps, training.save_steps) == (32, 125, 125)
    assert (loss.loss, loss.temperature, loss.mask_duplicates) == ("weince", 0.05, True)
    assert training.load_best_model_at_end and training.eval_on_start


def test_the_command_line_wins_over_the_file(tmp_path):
    config = write(tmp_path / "run.yaml", "learning_rate: 1e-6\nweight_decay: 1e-6\nloss: infonce\nbf16: true\n")
    _, _, loss, training, _ = parse("--config", config, "--learning_rate", "2e-5")
    assert training.learning_rate == 2e-5
    assert training.weight_decay == 1e-6 and isinstance(training.weight_decay, float)
    assert loss.loss == "infonce" and training.bf16 is True


def test_a_file_may_be_the_only_argument(tmp_path):
    config = write(tmp_path / "run.json", '{"model_name_or_path": "m", "train_file": ["a", "b"], "output_dir": "o"}')
    model, data, *_ = parse_training_arguments([config])
    assert model.model_name_or_path == "m" and data.train_file == ["a", "b"]


@pytest.mark.parametrize(
    "recipe", sorted(Path(__file__).parents[1].glob("scripts/configs/unsup_*.yaml")), ids=lambda p: p.stem
)
def test_shipped_recipes_parse(recipe):
    model, data, loss, training, _ = parse_training_arguments(["--config", str(recipe)])
    assert model.mlp_only_train and model.pooler_type == "cls" and loss.loss == "weince"
    assert data.dataset_name and training.max_seq_length == 32 and training.eval_steps == 125


def test_the_published_bert_base_recipe():
    recipe = Path(__file__).parents[1] / "scripts/configs/unsup_bert_base.yaml"
    model, _, loss, training, _ = parse_training_arguments([str(recipe)])
    assert model.model_name_or_path == "bert-base-uncased"
    assert (training.per_device_train_batch_size, training.learning_rate, loss.temperature) == (64, 3e-5, 0.05)


def test_simcse_command_line_runs_unchanged(caplog):
    """The flags of SimCSE's run_unsup_example.sh, with a note for each that was renamed."""
    model, data, loss, training, _ = parse_training_arguments(
        "--model_name_or_path bert-base-uncased --train_file data/wiki1m_for_simcse.txt "
        "--output_dir result/my-unsup-simcse-bert-base-uncased --num_train_epochs 1 --per_device_train_batch_size 64 "
        "--learning_rate 3e-5 --max_seq_length 32 --evaluation_strategy steps --metric_for_best_model stsb_spearman "
        "--load_best_model_at_end --eval_steps 125 --pooler_type cls --mlp_only_train --overwrite_output_dir "
        "--temp 0.05 --do_train --do_eval --fp16".split()
    )
    assert (model.pooler_type, model.mlp_only_train, loss.temperature) == ("cls", True, 0.05)
    assert (training.eval_strategy, training.eval_steps, training.overwrite_output_dir) == ("steps", 125, True)
    assert data.train_file == ["data/wiki1m_for_simcse.txt"]
    for old, new in (("--evaluation_strategy", "--eval_strategy"), ("--temp", "--temperature")):
        assert f"{old} is now called {new}" in caplog.text


def test_flags_without_effect_today_are_dropped_with_a_note(caplog):
    parse("--logging_dir", "logs", "--save_safetensors", "True")
    assert "--logging_dir has no effect any more" in caplog.text


@pytest.mark.parametrize("words", [["--mlp_only_train", "False"], ["--mlp_only_train=0"], ["--mlp-only-train", "no"]])
def test_vi04_false_is_false(words):
    assert parse(*words)[0].mlp_only_train is False


def test_vi04_switching_off_and_nonsense():
    assert parse("--no_mask_duplicates")[2].mask_duplicates is False
    assert parse("--mask_duplicates", "false")[2].mask_duplicates is False
    with pytest.raises(InputError, match="maybe"):
        parse("--mask_duplicates", "maybe")


def test_pk02_yaml_scientific_notation(case_inputs, tmp_path):
    """Every value of the case file becomes a number or a truth value, or its key is refused by name and line."""
    source = case_inputs / "config_sci_notation.yaml"
    with pytest.raises(InputError, match=r"config_sci_notation.yaml line 4: unknown key epochs; did you mean --num_"):
        parse("--config", str(source))
    text = source.read_text().replace("epochs", "num_train_epochs").replace("use_duplicate_mask", "mask_duplicates")
    _, _, loss, training, _ = parse("--config", write(tmp_path / "renamed.yaml", text))
    assert (training.learning_rate, training.weight_decay, loss.temperature) == (3e-5, 1e-6, 0.05)
    assert training.num_train_epochs == 2 and training.seed == 42 and loss.mask_duplicates is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate: fast\n", "line 1: .*fast"),
        ("seed: 1\n\nlerning_rate: 1e-5\n", "line 3: unknown key lerning_rate; did you mean --learning_rate"),
        ("seed: 1\nseed: 2\n", "line 2: seed is given twice"),
        ("- seed\n", "a configuration file holds lines such as"),
        ("seed: [1\n", "line 2: not YAML"),
        ("loss: softmax\n", "line 1: .*softmax"),
        ("seed: 1\nlearning_rate: [1e-5, 2e-5]\n", "line 2: learning_rate takes one value, not 2"),
        ("seed: &a [*a]\n", "line 1: seed has no value"),
        ("seed: 1\ndata_dir: ''\n", "line 2: --data_dir is empty"),
        ("accelerator_config: {? [1, 2] : 3}\n", "line 1: accelerator_config has no value"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        parse("--config", write(tmp_path / "bad.yaml", text))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lerning_rate", "1"], "unknown option --lerning_rate; did you mean --learning_rate"),
        (["--learning_rate", "x"], "learning_rate.*'x'"),
        (["--eval_step", "5"], "unknown option --eval_step"),
        (["--config", "missing.yaml"], "missing.yaml: .*cannot be read"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
        (["--dataset_name", "some/data"], "either --train_file or --dataset_name"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["--model_name_or_path", "--output_dir"])
def test_what_is_needed_is_named(missing):
    words = [word for pair in zip(NEEDED[::2], NEEDED[1::2], strict=True) if pair[0] != missing for word in pair]
    with pytest.raises(InputError, match=f"{missing} is missing"):
        parse_training_arguments(words)


def test_the_saved_configuration_is_the_run_again(tmp_path):
    first = parse("--loss", "infonce", "--weight_decay", "1e-6", "--text_column", "a", "b", "--gate", "0.3", "--bf16")
    saved = first.chosen
    config = write(tmp_path / "c.yaml", yaml.safe_dump(saved))
    again = parse_training_arguments(["--config", config, "--output_dir", "elsewhere"])
    assert [vars(group) for group in again[:3]] == [vars(group) for group in first[:3]]
    assert again.chosen == saved
    assert saved["weight_decay"] == 1e-6 and saved["text_column"] == ["a", "b"]


def test_the_saved_configuration_has_no_absolute_path_and_no_token(tmp_path):
    groups = parse("--train_file", str(tmp_path / "text.txt"), "--hub_token", "hf_secret")
    saved = str(groups.chosen)
    assert str(tmp_path) not in saved and "text.txt" in saved and "hf_secret" not in saved


def test_fixed_numbers_of_gate_and_shape():
    options = parse("--gate", "0.25", "--shape", "1")[2].options_of("weince")
    assert options["gate"] == 0.25 and options["shape"] == 1.0
    assert parse("--loss", "infonce", "--temp", "0.1")[2].options_of("infonce") == {"temperature": 0.1}


@pytest.mark.parametrize("fast", [True, False])
def test_tr09_fp16_without_a_gpu(monkeypatch, caplog, fast):
    """bfloat16 where the CPU has it, otherwise float32; either way with a note, and never a crash at the first step."""
    monkeypatch.setattr("simcse_weince.sentence.arguments.has_fast_bfloat16", lambda: fast)
    training = parse("--fp16", "--use_cpu")[3]
    assert (training.fp16, training.bf16) == (False, fast)
    assert f"using {'bfloat16' if fast else 'float32'} instead" in caplog.text


def test_bf16_on_a_cpu_without_it_is_kept_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("simcse_weince.sentence.arguments.has_fast_bfloat16", lambda: False)
    assert parse("--bf16", "--use_cpu")[3].bf16 and "has no bfloat16 arithmetic" in caplog.text


def test_dd01_one_gpu_instead_of_data_parallel(monkeypatch, caplog):
    from transformers import TrainingArguments
    from transformers.training_args import ParallelMode

    monkeypatch.setattr(TrainingArguments, "parallel_mode", property(lambda self: ParallelMode.NOT_DISTRIBUTED))
    training = parse()[3]
    assert training.n_gpu <= 1 and training._n_gpu == 1
    assert "accelerate launch" in caplog.text


def test_tr12_every_option_is_read_somewhere():
    """No dead option: each field of ours is used by code other than its declaration."""
    package = Path(simcse_weince.__file__).parent
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    own = [*dataclasses.fields(ModelArguments), *dataclasses.fields(DataArguments)]
    inherited = {field.name for field in dataclasses.fields(SimCSEArguments.__mro__[1])}
    own += [field for field in dataclasses.fields(SimCSEArguments) if field.name not in inherited]
    # ModelArguments go to build_encoder as keywords, the loss arguments to the criterion.
    from simcse_weince.criterion import Weince
    from simcse_weince.sentence.encoder import build_encoder

    keywords = set(inspect.signature(build_encoder).parameters) | set(inspect.signature(Weince).parameters)
    for field in own:
        used = re.search(rf"\.{field.name}\b", source) or field.name in keywords
        assert used, f"--{field.name} is declared and never read"
    from simcse_weince.losses import HardnessWeightedLoss

    keywords |= set(inspect.signature(HardnessWeightedLoss).parameters)
    handled = {"loss", "mask_duplicates", "gather_across_devices", "mini_batch_size"}  # see training_run._build_loss
    for field in dataclasses.fields(LossArguments):
        assert field.name in keywords | handled, f"--{field.name} is declared and never read"


def test_loss_arguments_have_the_criterions_defaults():
    from simcse_weince.criterion import Weince

    parameters = inspect.signature(Weince).parameters
    for field in dataclasses.fields(LossArguments):
        if field.name in parameters:
            assert field.default in (None, parameters[field.name].default), field.name  # None: that of the criterion
