"""Dataclasses that are the flags, the keys of a configuration file and the saved configuration, all at once."""

import difflib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser, TrainingArguments

from simcse_weince.errors import InputError, refuse_empty
from simcse_weince.outputs import shareable

logger = logging.getLogger(__name__)

# Flags of SimCSE's published commands and of older transformers: new name, or None for one without any effect today.
_RENAMED: dict[str, str | None] = {
    "evaluation_strategy": "eval_strategy",
    "temp": "temperature",
    "no_cuda": "use_cpu",
    "dropout_prob": "dropout",
    "logging_dir": None,
    "preprocessing_num_workers": None,
    "save_safetensors": None,
}
# What belongs to one start of a run or to one machine, or is a secret, and so is in no saved configuration.
_NOT_SAVED = ("cache_dir", "output_dir", "overwrite_output_dir", "resume_from_checkpoint", "hub_token")


def option(default: Any, help: str) -> Any:
    """A field of such a dataclass."""
    return field(default=default, metadata={"help": help})


def check_numbers(options: Any, smallest: Mapping[str, int], positive: Sequence[str] = ()) -> None:
    """Refuse numbers that a host would take and then stumble over, or do nothing with.

    Args:
        options: Holds a number, a list of numbers or None under each name.
        smallest: Name -> smallest number.
        positive: Names of those that must be above 0.

    Raises:
        InputError: A number is out of range, or a seed is none.
    """
    for name in (*smallest, *positive):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            if "seed" in name and number >= 2**32:
                raise InputError(f"--{name} {number} is not below 2^32")
            if not math.isfinite(number) or (number <= 0 if name in positive else number < smallest[name]):
                raise InputError(
                    f"--{name} {number} is not a number {'above 0' if name in positive else 'in its range'}"
                )


def check_training_numbers(training: TrainingArguments) -> None:
    """The numbers of every training, as :func:`check_numbers`, and what no encoder can be trained with."""
    if training.neftune_noise_alpha is not None:
        raise InputError("--neftune_noise_alpha is for language models that follow instructions; leave it out")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(training, name) < 1:
            raise InputError(f"--{name} {getattr(training, name)} is not from 0 to below 1")
    if training.greater_is_better is False:
        raise InputError(
            "--greater_is_better false would keep the worst checkpoint: every score is the better the higher"
        )
    counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    smallest = dict.fromkeys(counts, 1) | dict.fromkeys(("seed", "data_seed", "weight_decay", "max_grad_norm"), 0)
    length = "max_steps" if training.max_steps != -1 else "num_train_epochs"
    check_numbers(training, smallest, ["learning_rate", "eval_steps", "save_steps", "logging_steps", length])


class _Parser(HfArgumentParser):
    """HfArgumentParser whose errors are one sentence, and whose help does not begin with a page of usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(message.replace("argument --", "--", 1))


def parse_groups(
    groups: Sequence[Any],
    arguments: Sequence[str],
    prog: str | None,
    usage: str,
    saved: Mapping[str, Any] | None = None,
) -> list[Any]:
    """Parse options into dataclasses.

    What comes later wins: defaults, ``saved`` (the configuration of another run, of which unknown options are passed
    over), ``--config FILE`` (YAML or JSON; also as first argument without ``--config``), the command line. The values
    of all go through the same conversion, so that ``1e-6`` is a float and ``false`` is false in any of these places.

    Args:
        groups: The dataclasses.
        arguments: The command line without the program's name.
        prog: The program's name in the help text.
        usage: The first line of the help text.
        saved: See above.

    Returns:
        An object for each dataclass, then the options that differ from their defaults, in the form of a configuration
        file that can be shared: of an absolute path only the last part.

    Raises:
        InputError: An unknown or unconvertible option; names file, line and key.
    """
    parser = _Parser(groups, prog=prog, usage=usage, allow_abbrev=False)
    parser.add_argument("--config", help="YAML or JSON file with any of these options; the command line wins")
    known = {item.name for group in groups for item in fields(group)}
    tokens: list[str] = []
    for name, value in (saved or {}).items():
        if name in known:
            tokens += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    if arguments and not arguments[0].startswith("-") and arguments[0].endswith((".yaml", ".yml", ".json")):
        arguments = ["--config", *arguments]
    if sum(word.partition("=")[0] == "--config" for word in arguments) > 1:
        raise InputError("--config is given twice; put the options of both files into one")
    arguments = _renamed_flags(arguments)
    config = parser.parse_known_args(arguments)[0].config
    tokens += [] if config is None else _config_tokens(parser, Path(config))
    namespace, unknown = parser.parse_known_args([*tokens, *arguments])
    if unknown:
        raise InputError(f"unknown option {unknown[0]}{_suggestion(parser, unknown[0])}")
    refuse_empty(parser, namespace)
    try:
        parsed = [group(**{item.name: getattr(namespace, item.name) for item in fields(group) if item.init})
                  for group in groups]  # fmt: skip
    except InputError:
        raise
    except json.JSONDecodeError as error:
        name = next((name for name, value in vars(namespace).items() if value == error.doc), "an option")
        raise InputError(f"--{name} {error.doc}: not JSON ({error})") from error
    except (ValueError, TypeError, ImportError) as error:
        # What transformers refuses when it builds its arguments, such as a key that accelerator_config does not have.
        raise InputError(" ".join(str(error).split())) from error
    for name, value in vars(namespace).items():
        if isinstance(value, float) and not math.isfinite(value):  # which no run.json could hold
            raise InputError(f"--{name} {value} is not a finite number")
    defaults = parser.parse_known_args([])[0]  # converted as all values are: "no" of a switch is False
    chosen = {name: shareable(value) for name, value in vars(namespace).items()
              if name in known and name not in _NOT_SAVED and value != getattr(defaults, name)}  # fmt: skip
    return [*parsed, chosen]


def _renamed_flags(arguments: Sequence[str]) -> list[str]:
    """Translate the flags of older commands, saying so."""
    result: list[str] = []
    dropping = False
    for token in arguments:
        if not token.startswith("--"):
            if not dropping:
                result.append(token)
            continue
        name, equals, value = token[2:].partition("=")
        key = name.replace("-", "_")
        dropping = key in _RENAMED and _RENAMED[key] is None
        if dropping:
            logger.warning("--%s has no effect any more and is ignored", name)
        elif key in _RENAMED:
            logger.warning("--%s is now called --%s", name, _RENAMED[key])
            result.append(f"--{_RENAMED[key]}{equals}{value}")
        else:
            result.append(token)
    return result


def _config_tokens(parser: _Parser, path: Path) -> list[str]:
    """The command line that a configuration file stands for; every entry is checked on its own to name its line."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: the configuration file cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{place}: not YAML ({getattr(error, 'problem', None) or error})") from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise InputError(f"{path}: a configuration file holds lines such as `learning_rate: 3e-5`")
    tokens: list[str] = []
    seen: set[str] = set()
    for key_node, value_node in root.value:
        place = f"{path} line {key_node.start_mark.line + 1}"
        key = str(key_node.value).replace("-", "_")
        if key in seen:
            raise InputError(f"{place}: {key} is given twice")
        seen.add(key)
        if value_node.tag == "tag:yaml.org,2002:null":
            continue
        try:
            entry = _renamed_flags([f"--{key}", *_values(value_node)])
            if not entry:
                continue
            if not isinstance(value_node, yaml.SequenceNode):
                entry = [f"{entry[0]}={entry[1]}"]
            values, unknown = parser.parse_known_args(entry)
            refuse_empty(parser, values)
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        except (RecursionError, TypeError) as error:  # a list that holds itself, a mapping with a list for a key
            raise InputError(f"{place}: {key} has no value that an option can have") from error
        if unknown and not unknown[0].startswith("--"):
            raise InputError(f"{place}: {key} takes one value, not {len(unknown) + 1}")
        if unknown or key == "config":
            raise InputError(f"{place}: unknown key {key}{_suggestion(parser, key)}")
        tokens += entry
    return tokens


def _values(node: yaml.Node) -> list[str]:
    """A node as command-line words, as they are written in the file: YAML's own guesses at types play no part."""
    if isinstance(node, yaml.ScalarNode):
        return [node.value]
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return [item.value for item in node.value]
    return [json.dumps(_nested(node))]


def _nested(node: yaml.Node) -> Any:
    """A mapping or list of a file; numbers as on the command line, because YAML takes 1e-6 for a word."""
    if isinstance(node, yaml.MappingNode):
        return {key.value: _nested(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_nested(item) for item in node.value]
    value = yaml.safe_load(yaml.serialize(node))
    if isinstance(value, str) and node.style is None:
        with suppress(ValueError):
            return float(value)
    return value


def _suggestion(parser: _Parser, name: str) -> str:
    known = [option for action in parser._actions for option in action.option_strings if "_" in option or "-" in option]
    word = "--" + name.lstrip("-").split("=")[0].replace("-", "_")
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    close = close or [option for option in known if word[2:] in option][:1]
    return f"; did you mean {close[0]}?" if close else "; see --help"
