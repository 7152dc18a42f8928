"""What every step needs around the training loop: flags, clear errors, the device, the configuration."""

import argparse
import atexit
import contextlib
import errno
import functools
import json
import math
import os
import pathlib
import resource
import shutil
import signal
import sys
import time
import types

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.checkpoint import checkpoint

HERE = pathlib.Path(__file__).resolve().parent
ROOT = str(next((folder for folder in HERE.parents if (folder / "assets").is_dir()), HERE.parent))  # the repository
TINY_LLAMA = os.path.join(ROOT, "assets", "tiny_llama")
CONFIG_FIELDS = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "initializer_range", "hidden_act",
    "attention_bias", "mlp_bias",
}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # the disk is full, or what this user or a file may take of it


class UserError(ValueError):
    """A mistake in how the program was started. The message names the values and the remedy. See one_clear_error."""


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises its complaints as UserError, and that accepts no abbreviated flags."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        if message.startswith("unrecognized arguments"):  # without what follows the first flag: it may be a password
            flags = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            message = f"unrecognized arguments: {flags[0] if flags else 'words that belong to no flag'}"
        raise UserError(f"{message} (--help lists the flags)")


@contextlib.contextmanager
def one_clear_error(out_of_memory: str = "choose a smaller model"):
    """Wraps main(): a UserError ends the program with its message and exit code 2, and Ctrl-C ends it at once.

    Where memory runs out, the message ends with the remedy `out_of_memory`; where a disk is full, it says so. Any other
    exception is a fault of the program and keeps its traceback.
    Python's own handler of Ctrl-C waits for the main thread, which may be waiting in C++ code. The system's default
    action does not wait. On success the process ends by os._exit: in Python's own way to end, threads of gloo that
    still release tensors would abort it ("terminate called without an active exception").
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    except (UserError, RuntimeError, OSError) as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):  # of a GPU, of the CPU
            error = f"out of memory ({str(error).splitlines()[0]}): {out_of_memory}"
        elif isinstance(error, OSError) and error.errno in NO_ROOM:
            place = error.filename or "a file, or what is printed"
            error = f"can't write {place} ({error.strerror}): make room there (`df -h` shows which disk is full)"
        elif not isinstance(error, UserError):
            if "by peer" in str(error):  # another rank has ended, which says why: torchrun ends this one, too
                time.sleep(5)
            raise
        if int(os.environ.get("RANK", 0)) > 0:
            time.sleep(8)  # rank 0 usually reports the same error, and torchrun ends all; else it is this rank's own
        print(f"error: {error}", file=sys.stderr, flush=True)
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's summary, the last lines of all, ends with it
            report = {"message": str(error), "extraInfo": {"timestamp": int(time.time())}}
            with contextlib.suppress(OSError):
                pathlib.Path(path).write_text(json.dumps({"message": report}))
        sys.unraisablehook = lambda unraisable: None  # a file on a full disk fails once more when Python closes it
        sys.exit(2)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def writing(path: str):
    """Around what writes to `path`: where the disk is full, or may not be written, a UserError says so."""
    try:
        yield
    except OSError as error:
        raise UserError(f"can't write {path} ({error.strerror or error}): make room there, or choose another --log_dir"
                        ) from None


def number(kind: type, is_allowed, words: str):
    """The type of a flag that takes an int or a float. Other numbers than the allowed ones are refused in `words`."""
    def parse(text: str):
        if not is_allowed(value := kind(text)) or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be {words}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


positive_int = number(int, lambda value: value >= 1, "at least 1")
positive_float = number(float, lambda value: value > 0, "a number above 0")
zero_or_more = number(int, lambda value: value >= 0, "0 or more")
zero_or_more_float = number(float, lambda value: value >= 0, "0 or more")


def choose_device(device: str, dtype: str) -> tuple[torch.device, torch.dtype, str]:
    """The one place where the flags --device and --dtype become a device, a dtype and a communication backend.

    `auto` is CUDA where there is a GPU, and bfloat16 on GPUs that have it in hardware, else float32: a T4, V100, GTX
    10xx or RTX 20xx computes bfloat16 many times slower.
    NCCL needs a GPU for each rank of this machine. Where there are fewer, ranks share GPUs and communicate over gloo.
    Raises UserError where CUDA is asked for and absent.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no GPU: use --device cpu, or install a CUDA build of torch")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device(device), torch.float32 if dtype == "auto" else getattr(torch, dtype), "gloo"
    rank, ranks = os.environ.get("RANK", 0), os.environ.get("WORLD_SIZE", 1)  # some launchers don't count by machine
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    gpus = torch.cuda.device_count()
    if local_ranks > gpus and local_rank == 0:
        print(f"{local_ranks} ranks share {gpus} GPU(s) over gloo: messages pass through host memory", flush=True)
    torch.cuda.set_device(local_rank % gpus)
    if dtype == "auto":
        dtype = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
        if dtype == "float32" and int(rank) == 0:
            print(f"{torch.cuda.get_device_name()} has no bfloat16 in hardware: --dtype auto is float32", flush=True)
    return torch.device("cuda", local_rank % gpus), getattr(torch, dtype), "gloo" if local_ranks > gpus else "nccl"


def compile_layers(layers, device: torch.device) -> None:
    """Compiles each layer with torch.compile, at its first call. Layers of one shape share the compiled code.

    Raises UserError on the CPU if no C++ compiler is found.
    """
    if device.type == "cpu" and not shutil.which(compiler := os.environ.get("CXX", "g++")):
        raise UserError(f"--compile needs a C++ compiler, and {compiler!r} is not found: install one, or set CXX")
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def recompute_layers(layers) -> None:
    """Each layer keeps only its input. Backward then computes the layer's forward pass once more (Chen et al. 2016)."""
    for layer in layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


def require_reachable_hub(name: str, kind: str) -> None:
    """Raises UserError, within seconds, where the Hugging Face Hub can't be asked for `name`, which is no path."""
    from huggingface_hub import constants, get_session, scan_cache_dir

    if os.path.isdir(constants.HF_HUB_CACHE) and any(repo.repo_id == name for repo in scan_cache_dir().repos):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # of any kind: it depends on the network, on proxies, on HF_HUB_OFFLINE
        raise UserError(
            f"{kind} {name!r}: there is no such path ({os.path.abspath(name)}), and as a Hugging Face Hub id it can't "
            "be looked up, since the Hub can't be reached and its local cache lacks it: check the path, or the network"
        ) from None


def load_config(model_name: str, **overrides: int | None):
    """The Hugging Face configuration of `model_name`, a directory or a Hub id. An override of None keeps the model's
    value.

    Returns a plain namespace. transformers is imported only where config.json is missing, incomplete or no Llama's.
    """
    config = types.SimpleNamespace(**read_config(model_name))
    for name, value in overrides.items():
        if value is not None:
            setattr(config, name, value)
    if overrides["num_attention_heads"] is not None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def read_config(model_name: str) -> dict:
    """The fields of config.json. Where the file leaves out fields that the model needs, transformers fills them in."""
    try:
        with open(os.path.join(model_name, "config.json"), encoding="utf-8-sig") as file:
            fields = json.load(file)
        # Files of older versions have no rope_parameters, but these two fields, and some have no head_dim.
        rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        rope = {"rope_theta": fields.get("rope_theta", 10000.0), "rope_type": rope.get("type", "default"), **rope}
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        fields = {**fields, "head_dim": head_dim, "rope_parameters": rope}
        if fields["model_type"] == "llama" and CONFIG_FIELDS <= fields.keys():
            return fields
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError):
        pass  # transformers says below what is wrong with the file
    from transformers import AutoConfig  # imported only where it is needed, because it takes seconds

    if not os.path.isdir(model_name):
        require_reachable_hub(model_name, "--model_name")
    try:
        return AutoConfig.from_pretrained(model_name).to_dict()
    except Exception as error:  # fields of a wrong type raise errors of the library's own classes
        reason = " ".join(str(error).split())
        raise UserError(f"--model_name {model_name!r} holds no model configuration: {reason}") from None


def default_learning_rate(hidden_size: int) -> float:
    """Wider models need smaller steps, about in proportion (Yang et al. 2022): 3e-3 for 128, 3e-4 for 2048."""
    return min(3e-3, 0.6 / hidden_size)


def make_scheduler(optimizer: torch.optim.Optimizer, num_steps: int, warmup_steps: int, decay: str):
    """The learning rate rises for `warmup_steps` steps, then stays or, for "cosine", falls to 0 along half a cosine."""
    warm_up = LinearLR(optimizer, 1 / (warmup_steps + 1), total_iters=warmup_steps)
    if decay == "none":
        return warm_up
    cosine = CosineAnnealingLR(optimizer, T_max=max(1, num_steps - warmup_steps))
    return SequentialLR(optimizer, [warm_up, cosine], [warmup_steps]) if warmup_steps else cosine


def peak_memory_gb() -> float:
    """The most memory that this process has used so far, in GB: of the GPU if it has one, else of the machine."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9  # macOS counts bytes, Linux KiB


def to_readable_format(number: float) -> str:
    """1234567 -> '1.2M'."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.1f}".removesuffix(".0")
