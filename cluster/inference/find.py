"""Where a model's weights, its tokenizer and its adapter lie.

Over several hosts that share no disk, each of three may be somewhere else:

    a directory in Hugging Face's format, a Hub id     on each host, by the same name
    the checkpoint of a run                            its files on several disks: a host is sent those that it lacks
    an adapter, the tokenizer                          on home_rank()'s host, which reads them for all
"""

import contextlib
import glob
import os

from checkpoints.files import ADAPTER, ADAPTER_CONFIG, STATE, read_latest
from checkpoints.resume import Found, find_checkpoint
from pipeline_template import newer_than_tried
from ranks.collectives import gather
from ranks.disks import Disks
from ranks.files import read_json, unmarked
from stage_weights import look_into
from utils import UserError


@contextlib.contextmanager
def reading(path: str, what: str = "can't be loaded"):
    """Around libraries that read a model: each of their many errors becomes a UserError, `what` and its own words, or
    the damaged file of the folder `path`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, UserError):
        raise
    except BaseException as error:  # a panic of tokenizers' Rust is no Exception
        for file in glob.glob(f"{glob.escape(path)}/*.json") + glob.glob(f"{glob.escape(path)}/*.safetensors"):
            look_into(file, bool)
        raise UserError(f"{path} {what}: {' '.join(str(error).split())[:300]}"
                        f"{newer_than_tried('transformers')}{newer_than_tried('peft')}") from None


def read_tokenizer(path: str):
    """Raises UserError where it can't be loaded."""
    from transformers import AutoTokenizer

    with reading(path):
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer("")  # fields of a wrong type raise only here
        return unmarked(tokenizer)


def find(path: str, flag: str, *marks: str) -> str:
    """The checkpoint at a path, or the newest one of the run there. Raises UserError where it has none of `marks`."""
    given = path
    if latest := read_latest(path):
        path = os.path.join(path, os.path.basename(latest))
    if not any(os.path.isfile(os.path.join(path, mark)) for mark in marks):
        raise UserError(f"{flag} {given!r} has no {' and no '.join(marks)}: name the folder of a run, or one of its "
                        "step_...")
    return path


def find_model(args, whole: str | None = None) -> tuple[str, str, str | None]:
    """The directories, or Hub ids, of the weights, of the tokenizer, and of the adapter if there is one.

    `whole`: the checkpoint that --checkpoint means, where one knows already that all hosts together have all of it.
    """
    base, adapter = whole or args.checkpoint, args.adapter
    is_hub_id = base and not os.path.isdir(base) and not os.path.isabs(base) and base.count("/") == 1
    is_folder = base and not whole and not is_hub_id
    if is_folder:
        base = find(base, "--checkpoint", "config.json", ADAPTER_CONFIG)
        if not os.path.isfile(os.path.join(base, "config.json")):
            base, adapter = None, adapter or base  # a run that trained an adapter
    if adapter is None:
        return base, base, None
    adapter = find(adapter, "--adapter", ADAPTER)
    base = base or read_json(os.path.join(adapter, ADAPTER_CONFIG), lambda config: config["base_model_name_or_path"])
    if not base:
        raise UserError(f"{adapter}/{ADAPTER_CONFIG} names no model: add --checkpoint")
    has_tokenizer = os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
    return base, adapter if has_tokenizer else base, adapter


def find_checkpoint_of_run(args) -> tuple[Found | None, Disks | None]:
    """What --checkpoint means, where that is a run's, of all weights; home_rank() then has its small files. Collective.

    Raises UserError, on all ranks, where all disks together lack one of its files.
    """
    path = args.checkpoint and os.path.abspath(args.checkpoint)
    latest = path and os.path.join(path, os.path.basename(read_latest(path)))
    has = {name: bool(path) and os.path.isfile(os.path.join(latest, name)) for name in (STATE, ADAPTER_CONFIG)}
    has_all_weights = has[STATE] and not has[ADAPTER_CONFIG]
    if not any(gather(has_all_weights)):
        return None, None
    is_run = any(gather(bool(read_latest(path))))
    disks = Disks(path if is_run else os.path.dirname(path), "can't write {}: hosts put there what they lack")
    found = find_checkpoint(path, disks.folder, disks)
    small, home = [name for name in found.state["files"] if not name.endswith(".safetensors")], disks.home[0]
    disks.copy(found.path, [(name, found.holders[name][0], home) for name in small if home not in found.holders[name]])
    state = {**found.state, "optimizer_map": {}}  # which nobody needs here
    return found._replace(state=state), disks
